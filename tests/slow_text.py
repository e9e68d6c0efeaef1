"""Drafts of text alone by their definitions, over the whole text anew at every step; nothing of the product is used."""

import math

import numpy as np


def earlier(text: list[int], n: int) -> list[int]:
    """Where the last n tokens stood before, as starts."""
    return [i for i in range(len(text) - n) if text[i : i + n] == text[len(text) - n :]]


def vllm_v1(text, k, longest, shortest, *_, which=0):
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        if starts := earlier(text, n):
            return text[starts[which] + n :][:k]
    return []


def vllm_v2(text, k, longest, shortest, *_):
    found = vllm_v1(text, k, longest, shortest, which=-1)
    return found + [text[-1]] * (k - len(found))


def transformers(text, k, longest, _, left, end):
    found = vllm_v1(text, k, longest, 1) if left > 1 else []
    return found[: found.index(end)] if end in found else found


def openvino(text, k, longest, _, left, end):
    k = min(k, left - 1)
    return vllm_v1(text, k, len(text) // 2 if longest >= len(text) else longest, 1) if k > 0 else []


def onnx(text, k, n, _, left, end):
    return vllm_v1(text, min(k, left), n, n, which=-1)


def onnx_chained(text, k, n, _, left, end):
    found, context = [], text[-n:]
    while len(found) < min(k, left) and len(context) == n:
        starts = [i for i in range(len(text) - n) if text[i : i + n] == context]
        if not starts:
            break
        found.append(text[starts[-1] + n])
        context = [*context[1:], found[-1]]
    return found


def onnx_passes(prompt, answer, limit, setting):
    """Passes of ONNX Runtime GenAI as (guesses, rows, accepted, emitted), those before the first token left out."""
    k, n, chained, least, cooldown = setting
    text, at, passes, known = list(prompt), 0, [], True  # whether the last token went through the target
    width, origin, stable, tried, wait, failed, rest = least or k, None, 0, 0, 0, 0, False
    means, samples, one = {}, {}, np.float32
    while at < len(answer):
        budget = min(width, limit - at)
        guesses = [] if rest else (onnx_chained if chained else onnx)(text, budget, n, None, limit - at, None)
        rest, right, true = False, 0, answer[at:]
        while right < min(len(guesses), len(true)) and guesses[right] == true[right]:
            right += 1
        new = true[: right + 1]
        if not guesses:
            passes.append((0, 1, 0, 1))
        elif known:
            passes += [(0, 1, 0, 1), (len(guesses), len(guesses), right, len(new) - 1)]
        else:
            passes.append((len(guesses), 1 + len(guesses), right, len(new)))
        known = len(guesses) < 2
        if guesses:
            judged = right if right == len(guesses) else right + 1
            if cooldown and right == 0 and len(guesses) == (least or k):
                failed += 1
                rest = failed == 3
                failed = 0 if rest else failed
            else:
                failed = 0
            if least and len(guesses) == width:
                sample = [one(len(new)), one(2 if width == 1 else 1), one(right) / one(judged)]
                old = means.setdefault(width, sample)
                means[width] = [a + one(0.25) * (b - a) for a, b in zip(old, sample, strict=True)]
                samples[width] = samples.get(width, 0) + 1
                tokens, ms, acceptance = means[width]
                if origin is not None:
                    tried += 1
                    before = means[origin][0] / means[origin][1]
                    success = None
                    if tokens / ms < before * one(0.8):
                        success = False
                    elif tried >= 2:
                        success = tokens / ms >= before * one(0.97) and (width < origin or acceptance >= one(0.75))
                    if success is not None:
                        width, wait = (width, 1) if success else (origin, 6)
                        origin, tried, stable = None, 0, 0
                else:
                    stable += 1
                    if wait:
                        wait -= 1
                    elif samples[width] >= 2:
                        if acceptance < one(0.5) and width > least:
                            origin, width, tried, stable = width, width - 1, 0, 0
                        elif acceptance >= one(0.75) and width < 16 and stable >= 2:
                            origin, width, tried, stable = width, width + 1, 0, 0
        text += new
        at += len(new)
    return passes[1:]


class Windows:
    """ExLlamaV3's jobs at once, each [text, accepted (as counted) of every draft, window, rounds since it was last above 0]."""

    def __init__(self, k, m, dynamic):
        self.k, self.m, self.dynamic, self.jobs = k, m, dynamic, {}

    def start(self, number, prompt):
        self.jobs[number] = [list(prompt), [], self.k, 0]

    def mean(self, counted):
        mean = counted[0]
        for a in counted[1:]:
            w = 1.3 if a > mean else 0.65
            mean = w * a + (1 - w) * mean
        return mean

    def draft(self, number):
        job = self.jobs[number]
        if job[1] and self.dynamic:
            mean = self.mean(job[1])
            job[2] = max(1, min(self.k, math.ceil(mean)))
            if mean < 0.3:
                job[3] += 1
                job[2] = min(2, self.k) if job[3] == 16 else 0
                job[3] %= 16
            else:
                job[3] = 0
        window = max(job[2] for job in self.jobs.values())
        drafts = [longest_suffix(job[0], self.k, None, self.m, None, None) for job in self.jobs.values()]
        self.width = min([window, *map(len, drafts)])
        return longest_suffix(job[0], self.width, None, self.m, None, None)

    def commit(self, number, new, accepted):
        self.jobs[number][0] += new
        if self.width:
            self.jobs[number][1].append(accepted + (accepted == self.width))


def longest_suffix(text, k, _, shortest, left, end):
    """ExLlamaV3, and with ``shortest`` 1 TensorRT-LLM's suffix automaton."""
    return vllm_v1(text, k, len(text), shortest)


def shared_suffix(text, texts, k, most):
    """TensorRT-LLM's global pool: what any of the best matches drafts; ``text`` is one of the texts."""
    found = []
    for other in texts:
        for n in range(1, min(most, len(text)) + 1):
            starts = [i for i in range(len(other) - n) if other[i : i + n] == text[len(text) - n :]]
            if starts:
                end = starts[0] + n
                found.append(((n, other is text, len(other) - end), other[end : end + k]))
    best = max((value for value, _ in found), default=None)
    return [draft for value, draft in found if value == best] or [[]]


def slot(gram, factor, slots):
    code = 0
    for token in gram:
        code = (code * factor + token) % 2**64
    return code % slots


class Stateless:
    def begin(self, prompt):
        pass

    def accept(self, accepted):
        pass


class Simple(Stateless):
    """llama.cpp's ngram-simple: ``h`` is the text before the token that was just sampled, here and below."""

    def __init__(self, n, m):
        self.n, self.m = n, m

    def draft(self, text):
        n, m, h = self.n, self.m, text[:-1]
        starts = [j for j in range(1, len(h) - n) if h[j : j + n] == text[len(text) - n :]]
        if len(h) <= n + m + 1 or not starts:
            return []
        found = h[starts[-1] + n :][:m]
        return found if len(found) >= n else []


class Map:
    """ngram-map-k and k4v: slots hold the first n-gram that came, the latest first of those that come at once."""

    def __init__(self, n, m, hits, values):
        self.n, self.m, self.hits, self.values = n, m, hits, values
        self.slots, self.keys, self.indexed, self.begun, self.seen, self.chosen = [0] * 2**18, [], 0, 0, 0, None

    def slot(self, gram):
        return slot(gram, 2654435761, 2**18)

    def begin(self, prompt):
        size, edge = len(prompt), self.begun
        if edge > size:
            edge = size - self.n - self.m if size > self.n + self.m else 0
        if size < self.seen:
            self.slots = [at if at < edge else 0 for at in self.slots]
            self.indexed = max(edge - 1, 0)
            left = []
            for key in self.keys:
                key["values"] = [v for v in key["values"] if not self.values or v["at"] < edge]
                if key["at"] < edge and (not self.values or key["values"]):
                    left.append(key)
            self.keys = left
        self.seen = self.begun = size

    def draft(self, text):
        n, m, h = self.n, self.m, text[:-1]
        gram, self.chosen = text[len(text) - n :], None
        if len(h) < 2 * n + m:
            return []
        self.seen = len(h)
        most = len(h) - n - m - 1
        at = self.slots[self.slot(gram)]
        if not (0 < at < most and h[at : at + n] == gram):
            at = 0
        new = [j for j in range(self.begun - n - m - 1, 0, -1) if j > self.indexed]
        new += [j for j in range(most, 0, -1) if j > self.indexed and j > self.begun]
        at = at or next((j for j in new if h[j : j + n] == gram), 0)
        for j in new:
            where = self.slot(h[j : j + n])
            self.slots[where] = self.slots[where] or j
        self.indexed = max(self.indexed, most)
        if not at:
            return []
        key = next((key for key in self.keys if h[key["at"] : key["at"] + n] == gram), None)
        if key is None:
            key = {"at": at, "hits": 0, "done": 0, "values": [], "accepted": m}
            self.keys.append(key)
        key["hits"] += 1
        if not self.values:
            self.chosen = key
            return h[at + n :][: min(m, key["accepted"])]
        if key["hits"] < self.hits:
            return []
        for i in range(key["done"], at + 1):
            if h[i : i + n] == gram:
                value = h[i + n : i + n + m]
                for v in key["values"]:
                    if h[v["at"] : v["at"] + m] == value:
                        v["count"] += 1
                        break
                else:
                    if len(key["values"]) < 4:
                        key["values"].append({"at": i + n, "count": 1, "accepted": m})
        key["done"] = at
        best = max(key["values"], key=lambda v: v["count"])
        if best["count"] < 2 * sum(v["count"] for v in key["values"] if v is not best):
            return []
        self.chosen = best
        return h[at + n :][: min(m, best["accepted"])]

    def accept(self, accepted):
        if self.chosen:
            self.chosen["accepted"] = accepted


class Mod:
    """ngram-mod, its table of 4 million a dictionary."""

    def __init__(self, n, least, most):
        self.n, self.least, self.most, self.table, self.low = n, least, most, {}, 0

    def slot(self, gram):
        return slot(gram, 6364136223846793005, 4 * 2**20)

    def add(self, text, first, last):
        for i in range(first, last):
            self.table[self.slot(text[i : i + self.n])] = text[i + self.n]

    def begin(self, prompt):
        self.last = self.drafted = 0
        if len(prompt) >= self.n:
            self.add(prompt, 0, len(prompt) - self.n)
            self.last = len(prompt) - self.n

    def draft(self, text):
        h, self.drafted = text[:-1], 0
        if len(h) < self.n:
            return []
        if self.last + 32 < len(h):
            self.add(h, self.last, len(h) - self.n)
            self.last = len(h) - self.n
        found = []
        for i in range(self.most):
            slot = self.slot((text + found)[-self.n :])
            if slot not in self.table:
                if i < self.least:
                    return []
                break
            found.append(self.table[slot])
        self.drafted = len(found)
        return found

    def accept(self, accepted):
        if self.drafted:
            self.low = self.low + 1 if accepted / self.drafted < 0.25 else 0
            if self.low == 5:
                self.table, self.low, self.last = {}, 0, 0


class Cache(Stateless):
    """ngram-cache: counts in the order in which a small std::unordered_map of libstdc++ is walked."""

    def __init__(self):
        self.counts, self.seen = {}, 0

    def draft(self, text):
        if self.seen < len(text):
            new = text[self.seen :]
            for n in range(1, 5):
                for i in range(n, len(new)):
                    self.count(tuple(new[i - n : i]), new[i])
            self.seen = len(text)
        found = []
        while len(text) > 1 and len(found) < 8 and (token := self.next(text + found)) is not None:
            found.append(token)
        return found

    def count(self, gram, token):
        buckets = self.counts.setdefault(gram, [])  # the newest first, in each the newest first
        bucket = next((b for b in buckets if b[0][0] % 13 == token % 13), None)
        if bucket is None:
            buckets.insert(0, bucket := [])
        entry = next((e for e in bucket if e[0] == token), None)
        if entry is None:
            bucket.insert(0, entry := [token, 0])
        entry[1] += 1

    def next(self, text):
        for n in range(min(4, len(text)), 0, -1):
            entries = [e for bucket in self.counts.get(tuple(text[-n:]), []) for e in bucket]
            total = sum(count for _, count in entries)
            best = max(entries, key=lambda e: e[1], default=None)
            if best and total >= (2, 2, 1, 1)[n - 1] and 100 * best[1] >= (66, 50, 50, 50)[n - 1] * total:
                return best[0]
        return None


class MatchPool:
    """TensorRT-LLM's NGram: sets are lists, from which what is deleted while walking lets the next one be passed over."""

    def __init__(self, k, n, keep_all, oldest):
        self.k, self.n, self.keep_all, self.oldest, self.pool = k, n, keep_all, oldest, {}

    def start(self):
        self.first = 0

    def draft(self, text, left):
        if left <= 1:
            return []
        sizes = range(min(self.n, len(text) - 1), 0, -1)
        sequence = text[self.first :]
        for size in sizes:
            for at in range(len(sequence) - size):
                match = sequence[at + size :][: self.k]
                matches = self.pool.get(tuple(sequence[at : at + size]))
                if matches is None or (not self.keep_all and len(match) > len(matches[0])):
                    self.pool[tuple(sequence[at : at + size])] = [match]
                elif match not in matches:
                    i = 0
                    while i < len(matches):
                        if len(matches[i]) < len(match):
                            del matches[i]
                        i += 1
                    matches.append(match)
        self.first = max(0, len(text) - (self.k + self.n - 1))
        found = next((self.pool[tuple(text[-size:])] for size in sizes if tuple(text[-size:]) in self.pool), None)
        return found[0 if self.oldest else -1][: left - 1] if found else []


class SuffixTrie:
    """A counted trie of all suffixes of sequences, cut at a depth: nodes are [count, {token: node}, ordered tokens]."""

    def __init__(self, depth):
        self.depth, self.root, self.sequences = depth, [0, {}, []], {}

    def append(self, number, token):
        sequence = self.sequences.setdefault(number, [])
        sequence.append(token)
        for first in range(max(len(sequence) - self.depth, 0), len(sequence)):
            self.change(sequence[first:], 1)

    def change(self, path, by):
        """Add to the count of a path's end."""
        parent = self.at(path[:-1])
        _, children, order = parent
        token = path[-1]
        if token not in children:
            children[token] = [0, {}, []]
            order.append(token)
            children[token][0] = 1
            return
        own, i = children[token][0], order.index(token)
        counts = [children[other][0] for other in order]
        if by > 0 and i and counts[i - 1] <= own + 1:
            order.insert(counts.index(counts[i - 1]), order.pop(i))
        if by < 0 and i + 1 < len(order) and counts[i + 1] == own:
            order.insert(len(counts) - 1 - counts[::-1].index(own), order.pop(i))
        children[token][0] += by
        if children[token][0] == 0:
            order.remove(token)
            del children[token]

    def remove(self, number):
        sequence = self.sequences.pop(number, [])
        for first in range(len(sequence)):
            ends = range(first + 1, min(first + self.depth, len(sequence)) + 1)
            for path in [sequence[first:end] for end in ends]:
                if self.at(path):
                    self.change(path, -1)

    def at(self, path):
        node = self.root
        for token in path:
            node = node and node[1].get(token)
        return node

    def draft(self, context, length, factor, offset, least):
        best, score = [], 0.0
        for m in range(1, len(context)):
            node = self.at(context[-m:])
            if not node:
                break
            found, total, p = [], 0.0, 1.0
            while node[2] and len(found) < min(length, int(m * factor + offset + 1e-6)):
                child = node[1][node[2][0]]
                p *= child[0] / node[0]
                if p < least:
                    break
                found.append(node[2][0])
                total += p
                node = child
            if total >= score:
                best, score = found, total
        return best, score


class RecentTrie:
    """SGLang's trie: nodes are {token: node}, with time of use, frequency and whether they are still there."""

    def __init__(self, rows, depth, least, most, order, capacity):
        self.rows, self.depth, self.least, self.most, self.order = rows, depth, least, most, order
        self.room, self.clock, self.root = capacity - 1, 0, self.node(None, None)

    def node(self, parent, token):
        return {"children": {}, "parent": parent, "token": token, "freq": 0, "used": 0, "recent": 0, "gone": False}

    def all(self, node):
        return [one for child in node["children"].values() for one in [child, *self.all(child)]]

    def insert(self, window):
        for first in range(len(window)):
            path = window[first : first + self.depth]
            while self.room < len(path):
                oldest = min(self.all(self.root), key=lambda one: one["used"])
                assert not oldest["children"]
                del oldest["parent"]["children"][oldest["token"]]
                oldest["gone"], self.room = True, self.room + 1
            node, nodes = self.root, []
            for token in path:
                if token not in node["children"]:
                    node["children"][token] = self.node(node, token)
                    self.room -= 1
                node = node["children"][token]
                node["freq"] += 1
                self.clock += 1
                node["recent"] = self.clock
                nodes.append(node)
            for node in reversed(nodes):
                self.clock += 1
                node["used"] = self.clock

    def start(self):
        self.anchors, self.known = [], 0

    def walk(self, path):
        node = self.root
        for token in path:
            node = node and node["children"].get(token)
        return node

    def draft(self, text):
        window = text[-self.depth :]
        new = len(text) - self.known
        if not self.known or new > len(window) or any(node and node["gone"] for node in self.anchors):
            self.anchors = [self.walk(window[len(window) - d :]) for d in range(1, len(window) + 1)]
        else:
            for token in text[len(text) - new :]:
                nodes = [self.root, *self.anchors][: self.depth]
                self.anchors = [node and node["children"].get(token) for node in nodes]
        self.known = len(text)
        self.tree = [(None, None)]  # of every row its parent and token
        for d in range(len(self.anchors), 0, -1):
            if self.anchors[d - 1]:
                (self.bfs if self.order == "BFS" else self.prob)(self.anchors[d - 1], d)
        return self.tree[1:] + [(0, 0)] * (self.rows - len(self.tree))

    def row(self, parent, token):
        if (parent, token) not in self.tree:
            self.tree.append((parent, token))
        return self.tree.index((parent, token))

    def bfs(self, node, depth):
        levels = max(1, self.depth - 1)
        scale = (self.most - self.least) / levels
        queue = [(0, (levels - depth) * scale + self.least, node)]
        for parent, breadth, node in queue:
            children = sorted(node["children"].values(), key=lambda one: one["recent"], reverse=True)
            for child in children[: max(1, int(breadth))]:
                if len(self.tree) < self.rows:
                    queue.append((self.row(parent, child["token"]), breadth - scale, child))

    def prob(self, node, depth):
        """Of equally likely paths any may come first: `ties` says that some were."""
        heap = self.children(0, node, 1.0)
        while heap and len(self.tree) < self.rows:
            best = max(heap, key=lambda one: one[0])
            self.ties = self.ties or [one[0] for one in heap].count(best[0]) > 1
            heap.remove(best)
            p, parent, child = best
            heap += self.children(self.row(parent, child["token"]), child, p)

    ties = False

    def children(self, parent, node, p):
        order = sorted(node["children"].values(), key=lambda one: (-one["freq"], one["token"]))[: self.most]
        total = sum(one["freq"] for one in order)
        return [(one["freq"] / total * p, parent, one) for one in order]


class Corpus(RecentTrie):
    """SGLang's tree from a corpus: a node has all places of the documents behind its text, which are looked for at every step."""

    class Node(dict):
        def __init__(self, documents, places, token=None):
            super().__init__(token=token, freq=len(places), recent=max(places, default=None))
            self.documents, self.places = documents, places

        def __missing__(self, key):
            assert key == "children"
            following = {}
            for document, at in self.places:
                for token in self.documents[document][at : at + 1]:
                    following.setdefault(token, []).append((document, at + 1))
            return {token: Corpus.Node(self.documents, places, token) for token, places in following.items()}

    def __init__(self, documents, rows, depth, least, most, order):
        super().__init__(rows, depth, least, most, order, 1)
        self.documents = documents

    def places(self, text):
        ends = [(d, at) for d, one in enumerate(self.documents) for at in range(len(text), len(one) + 1)]
        return [(d, at) for d, at in ends if self.documents[d][at - len(text) : at] == text]

    def draft(self, text):
        self.tree, before = [(None, None)], []
        for depth in range(min(len(text), self.depth), 0, -1):
            places = self.places(text[-depth:])
            if places != [] and len(places) > len(before):
                node = self.Node(self.documents, places)
                (self.bfs if self.order == "BFS" else self.prob)(node, depth)
            before = places
        return self.tree[1:]
