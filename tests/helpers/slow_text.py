"""Drafts of text alone by their definitions, over the whole text anew at every step; nothing of the product is used."""


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
    return vllm_v1(text, k, longest, 1) if k > 0 else []


def longest_suffix(text, k, _, shortest, left, end):
    """ExLlamaV3, and with ``shortest`` 1 TensorRT-LLM's suffix automaton."""
    return vllm_v1(text, k, len(text), shortest)


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
                self.table.clear()
                self.low = self.last = 0


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
