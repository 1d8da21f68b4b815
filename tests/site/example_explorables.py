"""Three explorables of every control and every picture, for the tests; chapters have their own."""

from minimodel.lesson.explorable import (
    Axis,
    Bar,
    Bars,
    Checkbox,
    Choice,
    Explorable,
    Line,
    Lines,
    Number,
    Numbers,
    Slider,
    Spans,
    Text,
)

BLOCK = 16
FACT = "The code of the red door is 4821."


def note_bytes(layers: int, kv_heads: int, bits: int, shared: bool) -> dict:
    """Bytes of notes a token leaves: keys and values, 128 numbers a head, in layers that keep."""
    owners = -(-layers // 2) if shared else layers
    per_token = 2 * owners * kv_heads * 128 * bits / 8
    return {"owners": owners, "per_token": per_token, "tokens": 10**9 / per_token}


def heads_alone(kv_heads: int) -> dict:
    return note_bytes(31, kv_heads, 16, False)


def note_counter() -> Explorable:
    return Explorable(
        alt="Fewer heads, shared layers and fewer bits each divide the bytes of notes",
        twin=note_bytes,
        compute="""({layers, kv_heads, bits, shared}) => {
          const owners = shared ? Math.ceil(layers / 2) : layers;
          const per_token = 2 * owners * kv_heads * 128 * bits / 8;
          return {owners, per_token, tokens: 1e9 / per_token};
        }""",
        controls=[Number("layers", "layers", 1, 128, start=31),
                  Slider("kv_heads", "KV heads", [1, 2, 4, 8, 16, 32, 64], start=8),
                  Choice("bits", "precision of the notes", {32: "32 bits", 16: "16 bits",
                                                            8: "8 bits"}, start=16),
                  Checkbox("shared", "every second layer reads its neighbour's notes")],
        says="{owners} layers keep notes: {per_token} bytes a token.",
        names={"owners": "layers that keep notes", "per_token": "bytes a token",
               "tokens": "tokens in a gigabyte"},
        picture=[
            Numbers([("{per_token}", "bytes a token"), ("{tokens}", "tokens in a gigabyte")]),
            Bars("Bytes of notes a token", [
                Bar("per_token", "your design, {layers} layers", "notes"),
                Bar(128 * 31 * 2 * 8, "a run of ours", "prefill", kind="measured"),
                Bar(890, "a published design", "waste", kind="reported"),
            ], unit="B", log=(100, 10_000_000))])


def roof(batch: int, chip: str) -> dict:
    """The rate a chip reaches: bound by memory while a batch is small, by arithmetic after."""
    peak, bandwidth = CHIPS[chip]
    ridge = peak / bandwidth
    xs = [1, ridge, 4096]
    return {"ridge": ridge, "xs": xs, "ys": [min(peak, x * bandwidth) for x in xs],
            "rate": min(peak, batch * bandwidth),
            "bound": "memory" if batch < ridge else "arithmetic"}


CHIPS = {"small": [105, 1.8], "large": [989, 3.35]}


def roofline() -> Explorable:
    return Explorable(
        alt="A batch climbs the slope of the memory's roof until arithmetic limits it",
        twin=roof, data=CHIPS,
        compute="""({batch, chip}, chips) => {
          const [peak, bandwidth] = chips[chip], ridge = peak / bandwidth, xs = [1, ridge, 4096];
          return {ridge, xs, ys: xs.map(x => Math.min(peak, x * bandwidth)),
                  rate: Math.min(peak, batch * bandwidth),
                  bound: batch < ridge ? "memory" : "arithmetic"};
        }""",
        controls=[Choice("chip", "chip", list(CHIPS), start="large"),
                  Slider("batch", "requests in the batch", [2**i for i in range(13)], start=32)],
        says="A batch of {batch} reaches {rate} TFLOP/s, bound by {bound}.",
        picture=[Lines("The {chip} chip is bound by {bound}",
                       Axis("operations a byte", 1, 4096, log=True),
                       Axis("TFLOP/s", 1, 2000, log=True),
                       [Line("xs", "ys", "the roof", "waste", dots=False),
                        Line("batch", "rate", "{rate}", "decode"),
                        Line([8, 200], [4, 90], "measured here", "prefill", kind="measured", dy=14),
                        Line(900, 300, "as reported", "expert", kind="reported")]),
                 Lines("The same on linear axes", Axis("batch", 0, 100), Axis("TFLOP/s", 0, 350),
                       [Line("xs", "ys", "the roof", "waste", at=1),
                        Line("batch", "rate", "this batch", "decode")])])


def same_opening(first: str, second: str) -> dict:
    """Blocks of 16 bytes of two prompts: those before the first difference match."""
    if not first:
        raise ValueError("the first prompt is empty: type a byte at least")
    blocks = [[text.encode()[i:i + BLOCK] for i in range(0, len(text.encode()), BLOCK)]
              for text in (first, second)]
    same = 0
    for one, other in zip(*blocks, strict=False):
        if one != other or len(one) < BLOCK:
            break
        same += 1
    shown = [[[block.decode(errors="replace"), _meaning(i, same, block)]
              for i, block in enumerate(text)] for text in blocks]
    return {"first_blocks": shown[0], "second_blocks": shown[1], "same": same,
            "tokens": same * BLOCK, "price": len(second.encode()) - same * BLOCK * 0.98}


def _meaning(i: int, same: int, block: bytes) -> str | None:
    return "hit" if i < same else "miss" if len(block) == BLOCK else None


def openings() -> Explorable:
    return Explorable(
        alt="One byte changed at the top, and no block after it matches",
        twin=same_opening,
        compute="""({first, second}) => {
          if (!first) throw new Error("the first prompt is empty: type a byte at least");
          const BLOCK = 16, decoder = new TextDecoder("utf-8", {ignoreBOM: true});
          const blocks = [first, second].map(text => {
            const bytes = new TextEncoder().encode(text), cut = [];
            for (let i = 0; i < bytes.length; i += BLOCK) cut.push(bytes.slice(i, i + BLOCK));
            return cut;
          });
          const equal = (a, b) => a && b && a.length === BLOCK && b.length === BLOCK
            && a.every((byte, i) => byte === b[i]);
          let same = 0;
          while (equal(blocks[0][same], blocks[1][same])) same++;
          const meaning = (block, i) => i < same ? "hit" : block.length === BLOCK ? "miss" : null;
          const shown = blocks.map(all => all.map((b, i) => [decoder.decode(b), meaning(b, i)]));
          const size = blocks[1].reduce((sum, block) => sum + block.length, 0);
          return {first_blocks: shown[0], second_blocks: shown[1], same, tokens: same * BLOCK,
                  price: size - same * BLOCK * 0.98};
        }""",
        controls=[Text("first", "first prompt", f"{FACT}\nQ: red door?", rows=3),
                  Text("second", "second prompt", f"{FACT}\nQ: its owner?", rows=3,
                       more=['The code of the red door is <4821> & "more"', "x" * 16, "x" * 33])],
        says="{same} blocks match: {tokens} tokens are not read again.",
        picture=[Spans("Blocks of 16 bytes",
                       [("first_blocks", "first prompt"), ("second_blocks", "second prompt")],
                       {"hit": "remembered", "miss": "read again"}),
                 Bars("The second prompt, in tokens paid in full", [
                     Bar("price", "with a memory", "hit"),
                     Bar("tokens", "tokens found", "notes", text="{tokens} in {same} blocks")])])


EXAMPLES = (note_counter, roofline, openings)
