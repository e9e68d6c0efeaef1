"""The words by which tables say what they measured and what was run: one list for headers, labels, headings and cells."""

import re

DRAFTER = (
    r"(?:p-?)?eagle(?:[- ]?[123](?:\.\d)?\b|(?![- ]?[123]\b))|mtp|nextn|medusa|hydra|d-?flash(?:2(?!\d)|(?!2(?!\d)))|dspark|domino|jacobi|ddtree|"
    r"n-?gram(?:[-_ ]mod)?|prompt[- ]?lookup|lookahead|suffix(?: decoding)?|pard|pearl|draft[- ]model|re-?drafter|"
    r"mlp[- ]speculator|self[- ]spec\w*"
)
SPECULATION = rf"(?:spec(?:ulation|ulative)?(?:[- ]?dec(?:oding|ode)?)?|sd|draft(?:ing|er)?|{DRAFTER})"
PER_REQUEST = r"(?:/|\bper|\bsingle|\beach)[- ]?(?:user|req(?:uest)?|stream|client|seq(?:uence)?)\b"
SPEED = (
    r"(?:(?:output|generation|gen|decode|decoding|eval|mean|avg|average|median|total|aggregate|system)[ -])*"
    r"(?:\b(?:token )?(?:throughput|thru?put|tput|speed)\b|\bto?k(?:en)?s? ?(?:/|\\|per) ?s(?:ec(?:ond)?s?)?\b|\bt/s\b|\btps\b|\btok s\b|"
    r"\btg ?\d*\b)"
)
TPOT = r"\btpot\b|time per (?:output )?tok(?:en)?\b|\bm?s(?:ec)? ?(?:/|per) ?tok(?:en)?\b|per-?token latency|latency per token"
P99 = rf"\bp99\b.*(?:{TPOT})|(?:{TPOT}).*\bp99\b"
SECONDS, MICROSECONDS = r"[^a-z]*\bs(?:ec\w*)?\b", r"[^a-z]*\b[uµμ]s(?:ec\w*)?\b"
LENGTH = r"(?:len(?:gths?)?|tokens?|tok)\b"


def _compiled(*pairs: tuple[str, str]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((meaning, re.compile(pattern, re.IGNORECASE)) for meaning, pattern in pairs)


# In this order; what one has read the later ones do not see. "acceptance" is a length or a rate: its values decide.
MEASURES = _compiled(
    ("ignore", r"\bttft\b|\bitl\b|inter-?token|first token|\be2el?\b|(?<!token )\blatency\b(?! per tok)|(?:"
               + SPEED + r")[^a-z]*(?:/|\bper)[- ]?(?:gpu|card|device|chip|w(?:att)?|j|\$)\b|req(?:uest)?s? ?(?:/|per) ?s\w*|requests? throughput|"
               r"total token throughput|peak (?:" + SPEED + r")|\b(?:prompt|prefill|pp|input)\b.*(?:"
               + SPEED + r")|\bpp ?\d+\b|goodput|(?:draft|accepted) throughput|std ?(?:dev)? ?tpot"),
    ("tpot_p99_s", rf"(?:{P99}){SECONDS}"),
    ("tpot_p99_us", rf"(?:{P99}){MICROSECONDS}"),
    ("tpot_p99_ms", P99),
    ("ignore", r"\bp(?!50)\d\d\b.*|" + rf"(?:{TPOT}).*\bp(?!50)\d\d\b"),
    ("tokens_per_step", r"\btokens? ?(?:/|per) ?(?:step|pass|iteration|forward|round|verify)\w*|\bblock efficiency\b"),
    ("accepted_per_step", r"\baccepted (?:draft|drafted|guesses)[a-z ]* ?(?:/|per) ?(?:step|draft|round)|\b(?:avg|mean|average) accepted draft\w* tokens?"),
    ("positions", r"\bpositions?\b(?! ?\d)|(?:rates? )?(?:by|per)[- ]position(?: accept\w*)?(?: rates?)?"),
    ("acceptance_rate", r"\baccepted ?/ ?(?:drafted|generated|proposed|total)\b|\baccept\w*[- ]?(?:rate|%|percent\w*|ratio|prob\w*)|\bar ?\(?%\)?|\bhit rate|\baccept\w* ?\(%\)|"
                        r"% accepted|\balpha\b|α"),
    ("length", rf"(?:mean |avg |average )?(?:\baccept\w*|\bacc) ?{LENGTH}(?: ?(?:/|per) ?(?:step|draft|pass))?|\bal\b|\btau\b|τ|"
               r"mean accept\w*|avg accept\w*|accepted ?(?:/|per) ?(?:step|draft|pass)"),
    ("acceptance", r"\baccept(?:ance|ed)?\b|\bacc\b"),
    ("tokens_per_min", rf"(?:(?:{SPEED})[^a-z]*)?\btok(?:en)?s? ?(?:/|per) ?min(?:ute)?s?\b"),
    ("ktokens_per_s", rf"(?:(?:{SPEED})[^a-z]*)?\bk ?(?:tok(?:en)?s? ?(?:/|per) ?s(?:ec\w*)?|tps|t/s)\b|(?:{SPEED}) ?[(\[]k[)\]]"),
    ("tokens_per_s_per_request", rf"(?:{SPEED})[^a-z]*{PER_REQUEST}|{PER_REQUEST} (?:{SPEED})|tokens per s per request"),
    ("tpot_s", rf"(?:{TPOT}){SECONDS}|\bs(?:ec)? ?(?:/|per) ?tok(?:en)?\b"),
    ("tpot_us", rf"(?:{TPOT}){MICROSECONDS}|\b[uµμ]s ?(?:/|per) ?tok(?:en)?\b"),
    ("tpot_ms", rf"(?:mean |median |avg |\bp50 )?(?:{TPOT})(?: p50\b)?"),
    ("speedup", rf"(?:{SPEED})? ?\bspeed-?ups?\b(?: (?:vs|over|to|wrt)\b.*)?|\brelative(?: speed)?\b|\bratio\b"),
    ("gain", rf"(?:{SPEED}) (?:delta|gain|improvement|change)\b|Δ ?%?|\bdelta\b|\bvs\.? .*|\bgain\b|\bimprovement\b|% ?change|(?:% ?)?\bdiff(?:erence)?\b|\buplift\b|\bover (?:off|baseline)"),
    ("spread", r"(?:±|\+/-) ?(?:std|sd)?|\bstd(?: ?dev)?\b|\bstdev\b|\bsd\b"),
    ("stderr", r"\bstderr\b|\bstandard error\b|\bsem\b"),
    ("tokens_per_s", SPEED),
    ("prompts", r"\bnum prompts\b|#? ?(?:questions|prompts|samples)\b|\b(?:successful|completed|n) requests\b"),
    ("seconds", r"\bduration\b|\bseconds\b|\belapsed\b|\bwall ?(?:time|clock)\b"),
    ("repeats", r"\brepeats\b|\bn ?runs\b|\bruns\b|\brepetitions\b"),
)  # fmt: skip
K = (
    r"(?:speculative[ -])?(?:(?:num[ -]|n[ -]|max[ -])?(?:spec(?:ulative)?|draft(?:ed)?)[ -](?:n[ -])?"
    r"(?:tokens?|len(?:gth)?|steps?|depth|max|n)|num[ -]steps)|(?:spec[ -]draft[ -])?n[ -]max|(?:num[ -]|n[ -])?guess(?:es)?|depth|gamma|γ"
)
BLOCK = r"block(?: size)?|(?:speculative[ -])?num[ -]draft[ -]tokens"  # the last verified token is among them
CONCURRENCY = r"(?:max[ -])?(?:conc(?:urren(?:cy|t))?|batch(?:[ -]?size)?|bsz?|clients?|users?|(?:parallel[ -])?streams?|parallel|slots|np)"
AXES = _compiled(
    ("hardware", r"\b([tde]p ?=? ?\d{1,2}\b(?: ?[x×+/,] ?[tdpe]p ?=? ?\d{1,2}\b)*|[tde]p\d{1,2}(?:[x×][tdpe]p\d{1,2})+)"),
    ("block", rf"\b(?:{BLOCK}) ?[=:]? ?(\d+)\b|(?:(?<=(?:flash|lash2|spark|omino)[ -])|(?<=mtp[ -]))b ?=? ?(\d+)\b"),
    ("k", rf"(?<![a-z])(?:{K}|k|steps|spec|fixed|static)(?: ?[=:] ?| )(\d+)\b|\bdraft(?: ?= ?|[ -])(\d{{1,2}})\b(?!\.\d)|(?<!@ )\b[dn] ?=? ?(\d{{1,2}})\b|\bk(\d+)\b|\b(\d{{1,2}}) (?:(?:spec\w*|draft\w*) tokens?|(?:(?:spec\w*|draft\w*) )?steps?|guess(?:es)?)\b|\((\d+) (?:tokens?|steps?|drafts?)\)"),
    ("concurrency", rf"\b{CONCURRENCY} ?[=:@-]? ?(\d+)\b|\b(?:c|b(?! ?[123]00\b)) ?(\d{{1,3}})\b|\b[cb] ?[=≥] ?(\d+)\b|@ ?(\d+)\b|\b(\d+) (?:users?|clients?|streams?|parallel|"
                    r"concurrent|reqs?|requests|slots)\b(?: \w+)?"),
    ("temperature", r"\btemp(?:erature)? ?[=:]? ?(\d+(?:\.\d+)?)|\bt ?= ?(\d+(?:\.\d+)?)"),
    ("context", r"@ d(\d+)\b|\b(\d+ ?k?) (?:ctx|context)\b|\b(?:ctx|context)(?: len\w*)? ?[=:]? ?(\d+ ?k?)\b"),
    ("run", r"\b(?:run|rep(?:eat)?|trial|seed|iter(?:ation)?)[ #]*(\d+)\b"),
    ("position", r"\bpos(?:ition)?[ #=]*(\d+)\b"),
)  # fmt: skip
PLAIN = re.compile(
    rf"\b(?:no|non|without|w/o)[- ]?{SPECULATION}(?: decoding)?|\bwithout it\b|\b{SPECULATION}[ :=]*(?:off|disabled|none)\b|"
    r"\b(?:off|baseline|base|vanilla|none|autoregressive|plain|disabled|ar|target[- ]only)\b(?: decoding)?",
    re.IGNORECASE,
)
SPECULATES = re.compile(rf"\bwith {SPECULATION}", re.IGNORECASE)
ADAPTIVE = re.compile(
    r"\b(?:adaptive|dynamic|auto)\b(?: ?\(?(?:<=|≤|up to |max )? ?\d+(?:[-–]\d+)?\)?)?", re.IGNORECASE
)
SHORT_K = re.compile(
    rf"\b(?:{DRAFTER})(?: chain| tree| head| draft)?(?:[-x×=]|(?<=mtp)| ?\(?(?=\d{{1,2}}\)? *(?:[:;)(|/+]|,(?!\d)|$)))(\d{{1,2}})\b",
    re.IGNORECASE,
)
TREE = re.compile(
    r"(?<![\w.,-])\(?(\d{1,2})(?:-|, ?)(\d{1,2})(?:-|, ?)(\d{1,3})\)?(?![\w.-]|, ?\d)"
)  # SGLang's steps, topk and rows
DRAFTED = re.compile(rf"\b(?:{DRAFTER})", re.IGNORECASE)
NAMES = _compiled(
    ("block", BLOCK),
    ("k", rf"(?:(?:{DRAFTER}) )?(?:{K})|k|n|steps|num spec(?:ulative)?|spec|lookahead|speculation length"),
    ("concurrency", rf"{CONCURRENCY}(?: level)?|c|concurrent \w+|requests in[ -]flight|reqs|load|b"),
    ("drafter", r"drafter|draft(?: model)?|spec(?:ulative)? (?:method|algorithm|type)|speculator|algorithm|head"),
    ("label", r"|config\w*|set(?:ting|up)s?|method|mode|arm|variant|run|case|name|speculation|spec(?:ulative)?[ -]?dec\w*|decoding|type"),
    ("model", r"(?:target |base )?model(?: name)?|target|llm"),
    ("dataset", r"data ?sets?|data|benchmarks?|tasks?|workload|prompts?|category|subset|domain|suite"),
    ("note", r"notes?|remarks?|comments?|status|verdict|result|why|source|link|url|author|date|day"),
    ("ignore", r"#|id|idx|index|row|seed|rep(?:eat|etition)?|trial|iter(?:ation)?|run (?:id|#|no\.?)|rank"),
    ("option", r"(?:speculative[ -])?(?:eagle[ -])?top[ -]?k"),
    ("positions", r"pos|rates"),
    ("speedup", r"x|×|speed ?up \(?x\)?"),
    ("prompts", r"n prompts|requests"),
    ("tokens_per_s", r"t|toks|tok|tokens|decode|generation|output"),
    ("temperature", r"temp(?:erature)?"),
    ("context", r"\D*context\D*|ctx|depth of context"),
    ("input_tokens", r"isl|(?:input|prompt|prefill)[ -]?(?:len\w*|tok\w*)"),
    ("output_tokens", r"osl|(?:output|max|max new|gen\w*)[ -]?(?:len\w*|tok\w*)"),
    ("kv_type", r"kv.*|cache.*"),
    ("quantization", r"quant\w*|dtype|precision|weights"),
    ("version", r"version|commit|build|image|branch"),
    ("engine", r"engine|framework|server"),
    ("hardware", r"hardware|backend|gpus?|device|gpu type|[tpde]p|tp size"),
    ("setting", r"qps|request rate|top[ -]?p|isl ?/ ?osl|table|thinking|attention|cuda ?graphs?|eager|sampling|greedy"),
)  # fmt: skip
ENGLISH = (
    (r"(?:最大)?并发(?:请求)?[数度]?|gleichzeitige \w+|anfragen parallel|parallele anfragen", "concurrency"),
    (r"批(?:处理)?大小|batch-?größe", "batch size"),
    (r"(?:投机|推测)(?:解码)?(?:长度|步数)", "k"),
    (r"(?:关闭|无|不开|未开启)(?:投机|推测)(?:解码|采样)?|基线|ohne spek\w*", "no spec"),
    (r"なし", " no spec"),
    (r"\b(?:ohne|sans|sin)\b", "no"),
    (r"(?:输出|生成|解码)?(?:吞吐量?|速度)|durchsatz", "throughput"),
    (r"(?:平均)?接受长度|(?:akzeptanz|annahme)länge", "accept length"),
    (r"接受率|(?:akzeptanz|annahme)rate", "acceptance rate"),
    (r"加速比?|beschleunigung", "speedup"),
    (r"模型|modell\b", "model"),
    (r"数据集|datensatz", "dataset"),
    (r"配置|方法|konfiguration|methode", "config"),
)
NO_SPEED = re.compile(
    r"\b(?:time|latency|duration|slow-?down|cost|price|energy|power|memory|vram|ms|[uµμn]s|secs?|seconds?|min(?:ute)?s|hours?|(?<!\d )[kmg]i?b|"
    r"watts?|joules?|k?wh)\b|(?:[(\[/ ]|\bper )[sjw](?![\w/=])|[$€£]",
    re.IGNORECASE,
)  # of what less is better, or that is none
CANONICAL = {meaning for meaning, _ in MEASURES if meaning != "prompts"}  # figures under their own names
DERIVED = ("gain", "speedup")  # from two others
UNNAMED = "draft"  # drafter of an arm whose source names none
MOST_NAME = 5  # words
MOST_COUNT = 2**16
SHARE = re.compile(r"([\d.]+) ?/ ?([\d.]+)", re.ASCII)
SWITCH = re.compile(r"(on|yes|true|enabled|✓|✅)|off|no|false|disabled|✗|❌|-|–|—", re.IGNORECASE)
BLANK = "\x1f"  # in place of what was read
MODEL = re.compile(
    r"[\w./-]*(?:qwen|llama(?![-.]?(?:server|cpp|bench|cli))|gemma|deepseek|glm|mi[sx]tral|phi-?\d|gpt|kimi|nemotron|apertus|vicuna|minimax|\d+b\b)[\w./-]*"
    r"(?: \d[\w.-]*| flash\b| coder\b| nvfp4\b| fp8\b| bf16\b)*",
    re.IGNORECASE,
)
DATASET = re.compile(
    r"gsm-?8k|math-?\d*|human-?eval\+?|mbpp\+?|mt-?bench|alpaca|share-?gpt|spec-?bench|livecodebench|aime\S*|gpqa|mmlu\S*|"
    r"swe-?(?!ep)\w*|cnn\S*|summari[sz]ation|translation|\brag\b|\bcod(?:e|ing)\b|\bchat\b|\bqa\b",
    re.IGNORECASE,
)
QUANTIZATION = re.compile(r"\b(?:bf16|fp16|fp8|(?:nv|mx)?fp4|int[48]|awq|gptq|q[2-8]_\w+)\b", re.IGNORECASE)
CANNOT = re.compile(r"oom\b|out of memory|unsupported|not supported|cannot|crash|fail|err(?:or)?\b|✗|❌", re.IGNORECASE)
MISSING = re.compile(
    rf"[-–—−?/.\s]*|n/?a|nan|null|none|tbd|todo|time-?out|skip\w*|not run|dnf|dnr|pending|(?:{CANNOT.pattern}).*",
    re.IGNORECASE,
)
SUMMARY = re.compile(
    r"avg\.?|average|(?:geo(?:metric)?\.?[- ]?)?mean|gmean|overall|total|sum|median|min|max|std", re.IGNORECASE
)
NUMBER = re.compile(
    r"(?<![\w.])(?<![A-Za-z]-)([+-]?(?:[0-9]{1,3}(?:[,'_\u202f\u00a0 ][0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|[+-]?(?:\.[0-9]+|inf(?:inity)?\b))"
    r"(?: ?(%|x\b|×|k\b|[a-zµ/]+))?(?!\w|\.\d)(?: ?(?:±|\+/-|\+-) ?([0-9]*\.?[0-9]+) ?(%)?)?",
    re.IGNORECASE,
)
