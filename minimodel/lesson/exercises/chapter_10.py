"""The exercises of chapter 10. Block sizes and lengths are odd, so a swapped pair cannot pass."""

import random

from minimodel.lesson.exercises.common import pair_in
from minimodel.lesson.exercises.engine import (
    Chapter,
    Exercise,
    Verdict,
    function_in,
    right,
    wrong,
)

# --- 10.1 ----------------------------------------------------------------------------------


def check_count_hits(answer: object) -> Verdict:
    hits, computed = pair_in(answer)
    if (hits, computed) == (138, 312):
        return wrong("The other way round: the hit tokens first.")
    if hits in (317, 318):
        return wrong(f"{hits:.0f} would be right if single tokens could be found. Only full blocks "
                     "have keys: how many blocks lie wholly within the first 317 tokens?")
    if hits == 26:
        return wrong("26 is the number of blocks. How many tokens are that?")
    if hits == 324:
        return wrong("27 blocks would be 324 tokens, and the twenty-seventh holds the first token "
                     "that differs.")
    if hits != 312:
        return wrong("Divide 317 by 12 and round down: so many blocks are equal from the start.")
    if computed == 188:
        return wrong("188 would be left of the old prompt. The new one has 450 tokens.")
    if computed == 133:
        return wrong("133 tokens are new. Five more lie before the difference, in a block that is "
                     "found whole or not at all.")
    if computed != 138:
        return wrong("Whatever is not found is computed: 450 tokens less the hits.")
    return right("26 blocks of 12, so 312 tokens are found and 138 computed. Five tokens that are "
                 "the same are read again, because their block is not.")


COUNT_HITS = Exercise(
    id="10.1", kind="check", title="Count the hits",
    prompt="Blocks have 12 tokens. A prompt of 500 tokens is known. A new prompt of 450 tokens is "
           "equal to it in the first 317 tokens, and differs in the 318th. How many hit tokens "
           "does it have, and how many of its tokens are computed?",
    starter="answer = (..., ...)   # (hit tokens, computed tokens)",
    check=check_count_hits,
    hints=("How many full blocks lie before the first difference?",
           "317 = 26 x 12 + 5."),
    solution="hits = 317 // 12 * 12\nanswer = (hits, 450 - hits)",
)

# --- 10.2 ----------------------------------------------------------------------------------


def check_last_token(answer: object) -> Verdict:
    even, odd = pair_in(answer)
    if (even, odd) == (1, 12):
        return wrong("The other way round. In which of the two does the last token share its block "
                     "with others?")
    if even in (0, 1):
        return wrong(f"Not {even:.0f}: of 240 tokens the last one has to be computed, and it lies "
                     "in the twentieth block, with eleven others. A block is found whole or not "
                     "at all.")
    if even != 12:
        return wrong("240 = 20 x 12. How many of these 20 blocks may be found, if one token at "
                     "least is left?")
    if odd == 0:
        return wrong("0 rows give no logits, and without logits there is no first token.")
    if odd == 13:
        return wrong("The twentieth block is found here, for the last token lies outside of it.")
    if odd != 1:
        return wrong("241 = 20 x 12 + 1. What is left when 20 blocks are found?")
    return right("12 and 1. By the rule, (240 - 1) // 12 = 19 blocks may be found and (241 - 1) "
                 "// 12 = 20.")


LAST_TOKEN = Exercise(
    id="10.2", kind="check", title="The last token",
    prompt="Blocks have 12 tokens. A prompt of 240 tokens is sent twice, and so is another one of "
           "241 tokens. How many tokens does the second send of each compute?",
    starter="answer = (..., ...)   # (for 240 tokens, for 241 tokens)",
    check=check_last_token,
    hints=("Which block holds the last token, and who else is in there?",
           "Of n tokens at most (n - 1) // 12 blocks are found."),
    solution="answer = tuple(n - (n - 1) // 12 * 12 for n in (240, 241))",
)

# --- 10.3 ----------------------------------------------------------------------------------


def check_hits(answer: object) -> Verdict:
    hits, rng = function_in(answer), random.Random(103)
    cases = [(list("abcd"), set("abcd"), 29, 7), (list("abcd"), set("abcd"), 28, 7),
             (list("abcd"), set("abd"), 29, 7), (list("abcd"), set("bcd"), 31, 7),
             ([], set("ab"), 5, 7), (list("a"), set("a"), 7, 7)]
    for _ in range(40):
        size, full = rng.choice((3, 7, 11)), rng.randint(0, 9)
        chain = [f"key {i}" for i in range(full)]
        known = {key for key in chain if rng.random() < 0.85}
        cases.append((chain, known, full * size + rng.randint(0 if full else 1, size - 1), size))
    for chain, known, num_tokens, size in cases:
        found = hits(list(chain), set(known), num_tokens, size)
        longest = next((i for i, key in enumerate(chain) if key not in known), len(chain))
        expected = size * min(longest, (num_tokens - 1) // size)
        if found == expected:
            continue
        case = (f"{num_tokens} tokens in blocks of {size}, and of the {len(chain)} keys "
                f"{len(known)} are known")
        if found is None:
            return wrong("This returns nothing. Hand back the number of hit tokens.")
        if found == expected // size:
            return wrong("These are blocks. Hand back tokens: so many times the block size.")
        if found % size:
            return wrong(f"{case}: this finds {found} tokens, which is not a number of full "
                         "blocks. A block is found whole or not at all.")
        if found == size * longest:
            return wrong(f"{case}, all from the first on: this finds {found} tokens and leaves "
                         "none to compute. The last token must be left out.")
        if found > expected:
            return wrong(f"{case}: this counts {found} tokens, but the walk ends at place "
                         f"{longest}, where a key is unknown. What is known behind a gap is of no "
                         f"use. {expected} are hits.")
        return wrong(f"{case}; {expected} tokens are hits, this says {found}.")
    return right("The longest known beginning, without its last token. A key behind a gap can be "
                 "known when its ancestor was evicted before it: an orphan.")


HITS = Exercise(
    id="10.3", kind="code", title="Look up a chain",
    prompt="`hits` should return how many tokens of a prompt are hits: `chain` holds the keys of "
           "its full blocks in order, `known` the keys that the cache has, `num_tokens` how long "
           "the prompt is, `size` how many tokens a block has. The starter counts every known "
           "key. Two rules of the chapter are missing.",
    starter="""def hits(chain, known, num_tokens, size):
    return size * sum(key in known for key in chain)""",
    answer="hits",
    check=check_hits,
    hints=("Walk along the chain, and stop where a key is not known.",
           "However many are known: no more than (num_tokens - 1) // size blocks."),
    solution="""def hits(chain, known, num_tokens, size):
    found, most = 0, (num_tokens - 1) // size
    while found < min(most, len(chain)) and chain[found] in known:
        found += 1
    return found * size""",
)

# --- 10.4 ----------------------------------------------------------------------------------

TWINS = [([1, 23, 4], [12, 3, 4]), ([25, 5, 7], [2, 55, 7]), ([0, 0, 10], [0, 1, 0]),
         ([1, 2, 3], [1, 3, 2]), ([259, 1, 8], [2, 591, 8]), ([256, 0, 9], [0, 1, 9]),
         ([7, 1, 1], [7, 1, 257]), ([70_000, 3, 5], [70_000 % 65_536, 3, 5])]


def check_name_after(answer: object) -> Verdict:
    name_after, rng = function_in(answer), random.Random(104)
    one, two = (bytes(rng.choices(range(256), k=32)) for _ in range(2))
    for a, b in TWINS:
        try:
            first, second = name_after(one, list(a)), name_after(one, list(b))
        except (ValueError, OverflowError) as error:
            return wrong(f"For the tokens {a} or {b} this raises: {error}. Give each token room "
                         "enough, whatever its number.")
        if not isinstance(first, bytes):
            return wrong("A name is bytes here; this is of the type "
                         f"`{type(first).__name__}`.")
        if first == second:
            return wrong(f"The blocks {a} and {b} get the same name after the same beginning. How "
                         "do they look when you write them down the way your function does?")
        if name_after(two, list(a)) == first:
            return wrong(f"The block {a} gets the same name after two different beginnings: "
                         "`before` has to be hashed, too.")
        if name_after(bytes(one), list(a)) != first:
            return wrong("The same block after the same beginning gets another name the second "
                         "time. Nothing else may go into it.")
    for _ in range(300):
        a = rng.choices(range(300), k=rng.randint(1, 4))
        b = rng.choices(range(300), k=len(a))
        if a != b and name_after(one, a) == name_after(one, b):
            return wrong(f"The blocks {a} and {b} get the same name.")
    long, short = (name_after(one, list(range(length))) for length in (90, 3))
    if len(long) > 64:
        return wrong("These names grow with the text. Hash them: a name has one short length.")
    if len(short) < 16:
        return wrong(f"A name of {len(short)} bytes has too few values: sooner or later two blocks "
                     "get the same one by chance. Keep the whole digest.")
    return right("Every token has a place of its own, so different blocks are different bytes. A "
                 "separator between the numbers does as well. In the engine all blocks also have "
                 "the same number of tokens.")


NAME_AFTER = Exercise(
    id="10.4", kind="code", title="Names that cannot be confused",
    prompt="This `block_name` writes the token numbers one after the other before it hashes them. "
           "It has a fault that no amount of hashing can repair: it gives two different blocks the "
           "same name. Find such a pair, then mend the function.",
    starter="""def block_name(before, tokens):
    written = before.hex() + "".join(str(t) for t in tokens)
    return hashlib.sha256(written.encode()).digest()""",
    answer="block_name",
    check=check_name_after,
    hints=("What is written for the tokens 1 and 23? And for 12 and 3?",
           "Give each token the same number of bytes, with `token.to_bytes(4, \"little\")`, or "
           "put something between the numbers that is no digit."),
    solution="""import hashlib

def block_name(before, tokens):
    numbers = b"".join(token.to_bytes(4, "little") for token in tokens)
    return hashlib.sha256(before + numbers).digest()""",
)

# --- 10.5 ----------------------------------------------------------------------------------


def check_give_back(answer: object) -> Verdict:
    give_back, rng = function_in(answer), random.Random(105)
    for case in range(40):
        blocks = rng.sample(range(23), rng.randint(3, 11))
        cut = rng.randint(1, len(blocks))
        table, free = blocks[:cut], blocks[cut:]
        full = rng.randint(0, len(table)) if case % 3 else len(table)
        has_key = set(table[:full]) | set(free[rng.randint(0, len(free)):])
        found = give_back(list(table), list(free), set(has_key))
        if found is None:
            return wrong("This returns nothing. Hand back the new free list, the next to be "
                         "evicted first.")
        verdict = free_list_verdict(list(found), table, free, has_key)
        if verdict is not None:
            return verdict
    return right("Leaf first, unkeyed first, and whoever lay there before goes before the keyed "
                 "ones: the least recently used. `BlockPool.release` does the same, block by "
                 "block.")


def free_list_verdict(found: list, table: list, free: list, has_key: set) -> Verdict | None:
    """What is wrong with a free list after `table` was given back; None if nothing is.

    Blocks without a key stand in front, in any order: none of them can ever be found.
    """
    case = (f"Table {table}, free {free}; {sorted(has_key)} have keys: you return {found}.")
    if sorted(found, key=str) != sorted(table + free, key=str):
        return wrong(f"{case} Every block should be in it once.")
    plain = {block for block in table + free if block not in has_key}
    if set(found[:len(plain)]) != plain:
        return wrong(f"{case} Blocks without a key can never be found again: they should be in "
                     f"front, {sorted(plain)} before all others.")
    old = [block for block in free if block in has_key]
    new = [block for block in reversed(table) if block in has_key]
    if found[len(plain):len(plain) + len(old)] != old:
        return wrong(f"{case} Those that were free already have been unused for longer: {old} "
                     "should be taken, in this order, before the keyed ones that come back.")
    if found[len(plain) + len(old):] != new:
        return wrong(f"{case} Of the keyed blocks {new[::-1]} the last should be taken first, for "
                     "without its beginning a chain cannot be found.")
    return None


GIVE_BACK = Exercise(
    id="10.5", kind="code", title="Give back a table",
    prompt="A request ends. `table` lists its blocks in the order of its tokens (nobody else holds "
           "them), `free` the free blocks, the next to be taken first (those without a key lie in "
           "front), and `has_key` the set of blocks that have a key. Return the new free list: "
           "what can never be found again is taken first, then the longest unused, and a chain "
           "from its end.",
    starter="""def give_back(table, free, has_key):
    return free + table""",
    answer="give_back",
    check=check_give_back,
    hints=("Three groups stand in the new list: blocks without a key, those that were free "
           "before, those with a key.",
           "`reversed(table)` gives the last block first."),
    solution="""def give_back(table, free, has_key):
    plain = [b for b in reversed(table) if b not in has_key]
    keyed = [b for b in reversed(table) if b in has_key]
    return plain + free + keyed""",
)

# --- 10.6 ----------------------------------------------------------------------------------


def check_guesses(answer: object) -> Verdict:
    large, small = pair_in(answer)
    if (large, small) == (40, 200):
        return wrong("The other way round: blocks of 16 first. Does a smaller block tell more or "
                     "less?")
    if large == 10_000:
        return wrong("10,000 if all four digits lay in one block. Here two lie in each of two "
                     "blocks, and a hit on the first block already tells its two.")
    if large == 100:
        return wrong("100 for the first two digits. And then?")
    if large != 200:
        return wrong("First guess the two digits in the first block: a hit tells when they are "
                     "right. Then, with these, the two in the next one.")
    if small == 10:
        return wrong("10 for each digit. There are four.")
    if small == 10_000:
        return wrong("A hit on a block of one token tells one digit at a time: no need to guess "
                     "them together.")
    if small != 40:
        return wrong("With blocks of one token every digit can be checked by itself.")
    return right("200 and 40, where four digits in one block take up to 10,000. Finer blocks find "
                 "more of what is shared, and tell more to those who listen.")


GUESSES = Exercise(
    id="10.6", kind="check", title="How fast does it leak?",
    prompt="Bo looks for a code of four digits, each from 0 to 9, in a cache without salts. He "
           "knows the rest of the text, before it and after it. In blocks of 16, two of the digits "
           "lie at the end of one block and two at the beginning of the next. How many guesses "
           "does he need at most until he has seen a hit on every digit? And how many with blocks "
           "of one token?",
    starter="answer = (..., ...)   # (blocks of 16, blocks of 1)",
    check=check_guesses,
    hints=("What does a hit on the first of the two blocks tell him, before he knows the rest?",
           "Two digits have 100 values."),
    solution="answer = (100 + 100, 4 * 10)",
)

# --- 10.7, 10.8 ----------------------------------------------------------------------------

SHARED_PROMPT = Exercise(
    id="10.7", kind="think", title="One system prompt, five hundred tenants",
    prompt="A service has a system prompt of 2,000 tokens that all 500 tenants share, and then "
           "each tenant's own text. With a salt in the root, how often is the system prompt read "
           "and kept? Design something better that gives nothing away.",
    solution="**With the salt in the root** it is read and kept once for each tenant: a million "
             "tokens of notes for a text that is no secret.\n\n"
             "**Better**: the salt need not be in the root. Let the chain of the system prompt "
             "begin with a common root, and mix the tenant's salt into the key of the first block "
             "that holds anything else. All share the public blocks and nobody shares a private "
             "one. (vLLM's discussion of salts weighed such a second barrier, in issue 16016.)\n\n"
             "**What must hold**: the service, not the client, says where the public part ends; a "
             "block that holds both kinds of text is private; and nothing in the public part may "
             "depend on a tenant, or its hits tell who is here.",
)

BROKEN_CHAINS = Exercise(
    id="10.8", kind="think", title="Who breaks the chain?",
    prompt="A team's hit rate fell from 80 % to 5 % with a new release of their agent. The system "
           "prompt did not change. Name four things in the release that could have done it, and "
           "how you would find out which.",
    solution="**Something volatile in front**: a date, a request number, a user's name in the "
             "first lines.\n\n"
             "**An order that is not fixed**: tools or JSON fields that come out of a set or "
             "dictionary in another order in each process.\n\n"
             "**History that is rewritten**: old turns are shortened or summarised at the front, "
             "so everything after them is another text. Answers are sent back as text and cut into "
             "tokens differently.\n\n"
             "**Not the prompt at all**: another salt for each session instead of each tenant; new "
             "weights or another number format, which is a new fingerprint; requests spread over "
             "more machines, each with a cache of its own (chapter 15).\n\n"
             "**How to find out**: take two prompts that should share a beginning and look for the "
             "first token at which they differ. If there is none, compare the roots.",
)

CHAPTER = Chapter(
    10, "The same opening",
    [COUNT_HITS, LAST_TOKEN, HITS, NAME_AFTER, GIVE_BACK, GUESSES, SHARED_PROMPT, BROKEN_CHAINS],
    given="import hashlib",
)
