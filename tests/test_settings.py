"""Every setting is checked against its declared type, and its error names it and the cure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest

from omni_kvlink import KVLink, KVLinkError, SchemaError, TensorTransferData, UnavailableError
from omni_kvlink.connectors.base import Options
from omni_kvlink.settings import (
    Flag,
    Integer,
    Json,
    Number,
    Seconds,
    Settings,
    Size,
    SomeOf,
    Text,
    from_environment,
)
from support.connectors.keyless import is_let_in

if TYPE_CHECKING:
    from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Inner(Settings):
    depth: int = 1


@dataclasses.dataclass(frozen=True)
class Example(Settings):
    """A field of every type that has a rule by itself, and of the rules that have none."""

    needed: str
    flag: bool = False
    count: int = 0
    number: float = 0.5
    choice: Literal["one", "two"] = "one"
    maybe: int | None = None
    texts: tuple[str, ...] = ()
    pair: tuple[int, int] = (0, 0)
    by_name: dict[str, str] = dataclasses.field(default_factory=dict)
    inner: Inner = dataclasses.field(default_factory=Inner)
    some: Annotated[dict[str, Any], SomeOf(Inner)] = dataclasses.field(default_factory=dict)
    json: Annotated[dict[str, Any], Json()] = dataclasses.field(default_factory=dict)


def test_what_is_read_is_what_was_given() -> None:
    given: dict[str, Any] = {
        "needed": "x",
        "flag": True,
        "count": 3,
        "number": 2,
        "choice": "two",
        "maybe": 4,
        "texts": ["a", "b"],
        "pair": [1, 2],
        "by_name": {"a": "b"},
        "inner": {"depth": 2},
        "some": {"depth": 3},
        "json": {"a": [1, None, {"b": 0.5}]},
    }
    found = Example.read(given)
    plain = {**given, "texts": ("a", "b"), "pair": (1, 2), "inner": Inner(2)}
    assert vars(found) == plain
    assert type(found.number) is float
    assert dataclasses.replace(found, count=4).count == 4


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "at.needed is missing: a text"),
        ({"needed": None}, "at.needed=None: wanted a text"),
        ({"flag": "false"}, "at.flag='false': wanted true or false, a boolean and not a text"),
        ({"flag": 0}, "at.flag=0: wanted true or false"),
        ({"count": True}, "at.count=True: wanted a whole number"),
        ({"count": 1.0}, "at.count=1.0: wanted a whole number"),
        ({"count": "1"}, "at.count='1': wanted a whole number"),
        ({"number": float("nan")}, "at.number=nan: wanted a number"),
        ({"number": 10**400}, "at.number=1"),
        ({"number": True}, "at.number=True: wanted a number"),
        ({"choice": "tow"}, "at.choice='tow': wanted 'one' or 'two'; did you mean two?"),
        ({"maybe": "4"}, "at.maybe='4': wanted a whole number"),
        ({"texts": "ab"}, "at.texts='ab': wanted a list of any number of elements, each a text"),
        ({"texts": ["a", 5]}, "at.texts[1]=5: wanted a text"),
        ({"pair": [1]}, "at.pair=[1]: wanted a list of 2 elements, each a whole number"),
        ({"by_name": {"a": 1}}, "at.by_name.a=1: wanted a text"),
        ({"by_name": {"": "b"}}, "at.a key of by_name='': wanted a text that is not empty"),
        ({"by_name": ["a"]}, "at.by_name=['a']: wanted a map from texts to a text"),
        ({"inner": {"depth": "1"}}, "at.inner.depth='1': wanted a whole number"),
        ({"inner": {"dept": 1}}, "at.inner.dept: no such setting; did you mean depth? There are d"),
        ({"inner": None}, "at.inner=None: wanted a map of depth"),
        ({"some": {"x": 1}}, "at.some.x: no such setting; there are depth"),
        ({"json": {"a": {1, 2}}}, "at.json.a={1, 2}: wanted a value of JSON: null"),
        ({"flga": 1}, "at.flga: no such setting; did you mean flag? There are needed, flag"),
        ({5: 1}, "at.5: no such setting; there are needed"),
        ([], "at=[]: wanted a map of needed, flag"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given: Any, text: str) -> None:
    if isinstance(given, dict) and given and "needed" not in given:
        given = {"needed": "x", **given}
    with pytest.raises(SchemaError) as caught:
        Example.read(given, "at.")
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("17B", 17),
        ("8GB", 8 * 10**9),
        ("8 GiB", 8 << 30),
        ("512MiB", 512 << 20),
        ("16k", 16_000),
        ("16Ki", 16 << 10),
        ("1.5TB", 1_500_000_000_000),
        ("0.5KiB", 512),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert Size().read(text, "s") == Size().parse(text, "s") == Size().read(nbytes, "s") == nbytes


@pytest.mark.parametrize(
    "value",
    [
        *(
            "",
            "GB",
            "-1GB",
            "8XB",
            "8iB",
            "1.5",
            "1,5GB",
            "0.0001kB",
            "8gB",
            "1e9",
            "١GB",
            "9" * 40,
        ),
        *(True, 1.5e9, -1, 1 << 63, 10**30, None, b"8GB", [8]),
    ],
)
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(SchemaError, match=r"^s=.*: wanted bytes from 0 to 2\*\*63 - 1: a whole"):
        Size().read(value, "s")


def test_texts_become_what_they_say() -> None:
    """As a URL, an environment variable and a command line have them."""
    assert [Flag().parse(text, "f") for text in ("true", "1", "True")] == [True] * 3
    assert [Flag().parse(text, "f") for text in ("false", "0", "FALSE")] == [False] * 3
    assert (Integer().parse("-12", "i"), Integer(1).parse("12", "i")) == (-12, 12)
    assert (Number().parse("1.5", "n"), Seconds(endless=True).parse("inf", "n")) == (
        1.5,
        float("inf"),
    )
    for rule in (Flag(), Integer(), Number()):
        for text in ("", "yes", "no", "on", "nan", "1_0", " 1", "٣", "inf", "0x1"):
            with pytest.raises(SchemaError, match=r"^f="):
                rule.parse(text, "f")


def test_a_setting_without_a_rule_is_no_setting() -> None:
    """A field of a type that no rule checks fails as soon as its class is used."""

    @dataclasses.dataclass(frozen=True)
    class Wrong(Settings):
        anything: Any = None

    with pytest.raises(TypeError, match="no rule says what a setting of this type may be"):
        Wrong()


def test_values_whose_repr_fails() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(SchemaError, match="x=<Odd>: wanted a text"):
        Text().read(Odd(), "x")
    with pytest.raises(SchemaError, match="x=<int>: wanted bytes"):
        Size().read(10**5000, "x")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_X", raising=False)
    assert from_environment("KV_X", Size(), 7) == 7
    monkeypatch.setenv("KV_X", "2MiB")
    assert from_environment("KV_X", Size(), 7) == 2 << 20
    monkeypatch.setenv("KV_X", "two")
    with pytest.raises(SchemaError, match="KV_X='two': wanted bytes"):
        from_environment("KV_X", Size(), 7)


LINKS: list[tuple[Any, dict[str, Any], str]] = [
    ("inproc://x", {"insecure": "false"}, "insecure='false': wanted true or false"),
    ("inproc://x", {"trusted_network": "false"}, "trusted_network='false': wanted true or false"),
    ("inproc://x", {"insecure": None}, "insecure=None: wanted true or false"),
    ("inproc://x", {"insecure": 0}, "insecure=0: wanted true or false"),
    ("inproc://x", {"quota": 0}, "quota=0: wanted bytes from 1 to"),
    ("inproc://x", {"quota": True}, "quota=True: wanted bytes"),
    ("inproc://x", {"quota": 1.5e9}, "quota=1500000000.0: wanted bytes"),
    ("inproc://x", {"quota": 10**30}, "quota=1000"),
    ("inproc://x", {"quota": "much"}, "quota='much': wanted bytes"),
    ("inproc://x", {"prefault": "yes"}, "prefault='yes': wanted bytes"),
    ("inproc://x", {"inline": 32769}, "inline=32769: wanted bytes from 0 to 32768"),
    ("inproc://x", {"mode": "seald"}, "mode='seald': wanted 'pooled' or 'sealed'; did you mean s"),
    ("inproc://x", {"device": "gpu"}, "device='gpu': wanted 'cuda:0', with"),
    ("inproc://x", {"directory": "a\0b"}, r"directory='a\x00b': it must be UTF-8 without NUL"),
    ("inproc://x", {"keys": b"k"}, "keys=b'k': wanted a path"),
    ("inproc://x", {"allow_uids": 1000}, "allow_uids=1000: wanted a list of any number"),
    ("inproc://x", {"allow_uids": "1000"}, "allow_uids='1000': wanted a list of any number"),
    ("inproc://x", {"allow_uids": [True]}, "allow_uids[0]=True: wanted a whole number from 0 to 4"),
    ("inproc://x", {"allow_uids": {-1}}, "allow_uids[0]=-1: wanted a whole number from 0 to 42"),
    ("inproc://x?allow_uids=1000,me", {}, "allow_uids='me': wanted a whole number from 0 to 42949"),
    ("inproc://x", {"ucx_tls": ["tcp"]}, "ucx_tls=['tcp']: wanted a text"),
    ("inproc://x", {"qouta": 5}, "qouta: no such setting; did you mean quota? There are quota, "),
    ("inproc://x", {"copier": "nativ"}, "copier='nativ': wanted 'auto' or 'pinned'"),
    ("inproc://x", {"copier": None}, "copier=None: wanted 'auto'"),
    ("inproc://x?insecure=no", {}, "insecure='no': wanted true, false, 1 or 0"),
    ("inproc://x?insecure", {}, "insecure='': wanted true, false, 1 or 0"),
    ("inproc://x?trusted_network=2", {}, "trusted_network='2': wanted true, false, 1 or 0"),
    ("inproc://x?quota=", {}, "quota='': wanted bytes"),
    ("inproc://x?quota=1k&quota=2k", {}, "quota='2k': it was also given as 1000"),
    ("inproc://x?qouta=5", {}, "qouta: no such setting; did you mean quota?"),
    (None, {}, "url=None: wanted a text such as 'shm://name'"),
    (7000, {}, "url=7000: wanted a text such as 'shm://name'"),
    ("shm:toy", {}, "'shm:toy' is not a link URL; one looks like shm://name; did you mean shm://toy?"),
    ("toy", {}, "'toy' is not a link URL; one looks like shm://name"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "options", "text"), LINKS)
def test_options_of_a_link(url: Any, options: dict[str, Any], text: str) -> None:
    """Each is refused at both ends before anything is opened."""
    for end in (KVLink.serve, lambda *given, **named: KVLink.connect(*given, timeout=0, **named)):
        with pytest.raises(SchemaError) as caught:
            end(url, **options)
        assert str(caught.value).startswith(text)


def test_digests_are_a_flag() -> None:
    with pytest.raises(SchemaError, match="digests='false': wanted true or false"):
        KVLink.serve("inproc://flag", digests="false")  # type: ignore[arg-type]  # on purpose
    data = TensorTransferData("k", {})
    with KVLink.serve("inproc://flag") as producer:
        for name in ("digests", "direct", "background"):
            with pytest.raises(SchemaError, match=f"{name}='false': wanted true or false"):
                producer.put(data, **{name: "false"})  # type: ignore[arg-type]


def test_forms_that_are_allowed(tmp_path: Path) -> None:
    """Sizes as texts, in the URL, too; paths as objects."""
    url = "inproc://sizes?prefault=0&inline=4KiB&insecure=false&mode=sealed"
    with KVLink.serve(url, quota="8MB", directory=tmp_path) as producer:
        assert producer.stats()["memory"]["quota"] == 8_000_000
    assert Options(directory=tmp_path).directory == str(tmp_path)  # type: ignore[arg-type]


def test_a_scheme_that_is_almost_one() -> None:
    with pytest.raises(UnavailableError, match=r"no connector 'zmq\+tpc'; did you mean zmq\+tcp\?"):
        KVLink.serve("zmq+tpc://127.0.0.1:0")


@pytest.mark.parametrize("form", ["keyword", "url", "default", "insecure"])
def test_a_keyless_peer(form: str) -> None:
    """Whatever says that a link is not insecure is refused, or keeps a peer without keys out."""
    url = "zmq+tcp://127.0.0.1:0"
    if form == "keyword":
        with pytest.raises(KVLinkError, match="insecure='false'"):
            KVLink.serve(url, insecure="false")  # type: ignore[arg-type]  # on purpose
        return
    options: dict[str, Any] = {"insecure": True} if form == "insecure" else {}
    with KVLink.serve(f"{url}?insecure=false" if form == "url" else url, **options) as producer:
        producer.put(TensorTransferData("secret", {}))
        assert is_let_in(producer.url) == (form == "insecure")
