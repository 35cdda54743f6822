"""Draws the diagrams of the pages: `python docs/pictures/draw.py`."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
INK, PALE, ACCENT, MUTED = "#1f2937", "#eef2ff", "#4f46e5", "#6b7280"
FONT = "font-family='system-ui, sans-serif'"


def text(
    x: float, y: float, content: str, size: int = 14, color: str = INK, weight: int = 400
) -> str:
    """One centred line."""
    return (
        f"<text x='{x}' y='{y}' {FONT} font-size='{size}' font-weight='{weight}' fill='{color}' "
        f"text-anchor='middle'>{content}</text>"
    )


def box(x: float, y: float, width: float, height: float, *lines: str, fill: str = PALE) -> str:
    """A rounded box; its first line is bold."""
    top = y + height / 2 - 9 * (len(lines) - 1) + 5
    shape = (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='8' fill='{fill}' "
        f"stroke='{ACCENT}' stroke-width='1.5'/>"
    )
    words = [
        text(x + width / 2, top + 18 * n, line, 14 if n == 0 else 12, weight=600 if n == 0 else 400)
        for n, line in enumerate(lines)
    ]
    return shape + "".join(words)


def arrow(
    x1: float, y1: float, x2: float, y2: float, label: str = "", *, dashed: bool = False
) -> str:
    """An arrow with a label above its middle."""
    dash = " stroke-dasharray='5 4'" if dashed else ""
    line = (
        f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{INK}' stroke-width='1.5'{dash} "
        "marker-end='url(#head)'/>"
    )
    return line + (text((x1 + x2) / 2, min(y1, y2) - 8, label, 12, MUTED) if label else "")


def picture(name: str, width: int, height: int, *parts: str) -> None:
    """Write one SVG file on a white ground, so that it can be read in a dark theme, too."""
    head = (
        "<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' "
        f"markerHeight='7' orient='auto'><path d='M0 0L10 5L0 10z' fill='{INK}'/></marker></defs>"
    )
    ground = f"<rect width='{width}' height='{height}' rx='12' fill='white'/>"
    body = "\n".join(parts)
    opening = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}'>"
    (HERE / f"{name}.svg").write_text(f"{opening}\n{head}{ground}\n{body}\n</svg>\n")


def one_copy() -> None:
    """The caller's tensors, the link's memory, the consumer's views."""
    dashes = f"fill='none' stroke='{MUTED}' stroke-dasharray='4 4'"
    picture(
        "one_copy",
        760,
        250,
        f"<rect x='20' y='40' width='330' height='190' rx='12' {dashes}/>",
        f"<rect x='410' y='40' width='330' height='190' rx='12' {dashes}/>",
        text(185, 28, "producer's process", 13, MUTED),
        text(575, 28, "consumer's process", 13, MUTED),
        box(45, 70, 130, 70, "K, V", "the engine's tensors"),
        box(300, 70, 160, 70, "memory of the link", "one mapping in each", fill="#dcfce7"),
        box(590, 70, 130, 70, "K, V", "readonly views"),
        arrow(175, 105, 298, 105, "the one copy"),
        arrow(460, 105, 588, 105, "no copy"),
        box(45, 175, 130, 40, "put"),
        box(590, 175, 130, 40, "get"),
        arrow(175, 195, 588, 195),
        text(265, 187, "the commit is a message", 12, MUTED),
        text(505, 187, "that wakes the get", 12, MUTED),
    )


def lifetime() -> None:
    """States of a payload, from the producer's side."""
    ends = (("released", 40), ("failed", 120), ("expired", 200))
    picture(
        "lifetime",
        900,
        260,
        box(20, 110, 120, 50, "reserved", "put copies"),
        box(220, 110, 120, 50, "committed", "put returned"),
        box(420, 110, 140, 50, "offered", "a reader maps it"),
        arrow(140, 135, 218, 135, "commit"),
        arrow(340, 135, 418, 135, "get"),
        *(box(740, y, 140, 44, name, fill="#fef3c7") for name, y in ends),
        arrow(560, 128, 738, 64, "every reader released"),
        arrow(560, 137, 738, 142, "fail, abort"),
        arrow(560, 146, 738, 220),
        text(690, 216, "ttl", 12, MUTED),
        arrow(490, 160, 490, 205, dashed=True)
        + text(490, 225, "a reader died: offered to the next", 12, MUTED),
    )


def get_states() -> None:
    """States of a get, from the consumer's side."""
    names = (
        ("connecting", "no producer yet"),
        ("requested", "before the commit"),
        ("offered", "its size is known"),
        ("fetched", "network only"),
        ("delivered", "header checked"),
    )
    parts = [box(20 + 170 * n, 50, 130, 56, *name) for n, name in enumerate(names)]
    parts += [arrow(150 + 170 * n, 78, 188 + 170 * n, 78) for n in range(4)]
    parts.append(
        box(240, 165, 420, 44, "TransferTimeout, TransferFailed, PeerLostError", fill="#fee2e2")
    )
    parts += [arrow(85 + 170 * n, 106, 450 + 40 * (n - 2), 163, dashed=True) for n in range(4)]
    picture("get_states", 860, 230, *parts)


def payload() -> None:
    """The bytes of a payload."""
    spans = (
        (20, 90, ("length", "8 bytes"), PALE),
        (110, 220, ("header", "JSON: names, shapes, digests"), PALE),
        (330, 150, ("kv.0.key", "the tensor's bytes"), "#dcfce7"),
        (480, 34, ("pad",), "#f3f4f6"),
        (514, 150, ("kv.0.value", "the tensor's bytes"), "#dcfce7"),
        (664, 34, ("pad",), "#f3f4f6"),
        (698, 150, ("kv.1.key …",), "#dcfce7"),
    )
    parts = [box(x, 50, width, 60, *lines, fill=fill) for x, width, lines, fill in spans]
    parts += [
        f"<line x1='{330 + 37.5 * n}' y1='110' x2='{330 + 37.5 * n}' y2='122' stroke='{MUTED}'/>"
        for n in range(5)
    ]
    parts += [
        text(405, 138, "a CRC-32C for each MiB", 12, MUTED),
        text(405, 36, "starts on a multiple of 256", 12, MUTED),
        text(220, 138, "a CRC-32C of its own", 12, MUTED),
    ]
    picture("payload", 870, 155, *parts)


def stream() -> None:
    """When layers are computed, copied in and copied out, with `put` and with `stream_put`."""
    fills = ("#fef3c7", "#dcfce7", PALE)
    names = ("computed", "copied into the link", "copied out by the consumer")
    parts = []

    def bar(x: float, row: int, kind: int, label: str, width: float) -> None:
        y = 60 + 34 * row
        parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='26' rx='5' fill='{fills[kind]}' "
            f"stroke='{ACCENT}'/>"
        )
        parts.append(text(x + width / 2, y + 18, label, 12))

    parts += [text(70, 98, "put, get", 13, weight=600), text(70, 218, "stream_put", 13, weight=600)]
    parts.append(text(70, 236, "stream_get", 13, weight=600))
    step = 90
    for layer in range(4):
        bar(150 + step * layer, 0, 0, str(layer), step - 4)
        bar(150 + step * layer, 4, 0, str(layer), step - 4)
        bar(150 + step * (layer + 1), 5, 1, str(layer), 34)
        bar(150 + step * (layer + 1) + 40, 6, 2, str(layer), 34)
    bar(150 + step * 4, 1, 1, "0 to 3", 130)
    bar(150 + step * 4 + 136, 2, 2, "0 to 3", 130)
    for kind, name in enumerate(names):
        x = 160 + 210 * kind
        parts.append(f"<rect x='{x}' y='20' width='18' height='18' rx='4' fill='{fills[kind]}'/>")
        parts.append(text(x + 26 + 3.3 * len(name), 34, name, 12, MUTED))
    parts.append(text(700, 302, "time →", 12, MUTED))
    picture("stream", 800, 315, *parts)


def messages() -> None:
    """The messages of one get, over shared memory and over a network."""
    parts = [f"<line x1='450' y1='20' x2='450' y2='400' stroke='{MUTED}' stroke-dasharray='2 4'/>"]
    for left, title, middle in (
        (20, "shared memory", (("Memory + descriptor", -1), ("Offer", -1))),
        (470, "a network", (("Offer", -1), ("FetchRange", 1), ("Chunk + bytes", -1))),
    ):
        ends = left + 60, left + 350
        parts.append(text(left + 205, 30, title, 14, weight=600))
        for x, name in zip(ends, ("consumer", "producer"), strict=True):
            parts.append(box(x - 55, 42, 110, 30, name))
            parts.append(f"<line x1='{x}' y1='72' x2='{x}' y2='412' stroke='{ACCENT}'/>")
        rows = (("Hello", 1), ("Hello", -1), ("Get", 1), ("Status", -1), *middle, ("Release", 1))
        for number, (name, direction) in enumerate(rows):
            y = 104 + 40 * number + (14 if number >= 4 else 0)
            start, end = (ends[0], ends[1] - 2) if direction > 0 else (ends[1], ends[0] + 2)
            parts.append(arrow(start, y, end, y, name, dashed=name == "Status"))
        parts.append(text(ends[1] - 40, 244, "put commits", 12, MUTED))
    picture("messages", 900, 425, *parts)


if __name__ == "__main__":
    one_copy()
    lifetime()
    get_states()
    messages()
    payload()
    stream()
