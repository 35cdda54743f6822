"""The command lines: every option of every command × wrong words, help, versions, imports."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import __version__
from omni_kvlink.bench import commands as bench
from omni_kvlink.bench import setups
from omni_kvlink.bench.commands import COPIERS
from omni_kvlink.bench.pace import RECEIVE
from omni_kvlink.cli import commands as kvlink
from omni_kvlink.cli.arguments import STATUS, NumberArgument, Parser
from omni_kvlink.copier import Copier, named_copier
from support.processes.fork_server import new_interpreters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Reaches into _action_groups, _actions, _group_actions: argparse has no public list of what a
# parser takes.

MODULES = {"kvlink": kvlink, "kvlink-bench": bench}
WORDS = (
    *("abc", "", " ", "-5", "0", "1.5", "1e400", "nan", "inf", "-inf", "0x10", "1_000_000_000_000"),
    *("true", "False", "None", "8GB", "☃", "a b", "1,5", "٣", "[1]", "{}", "%s", "%(default)s"),
    *("shm", "://", "pigeon://x", "/dev/null", "/nowhere/at/all", "9" * 400, "a\nb"),
)


def parsers() -> Iterator[tuple[str, Parser]]:
    """Every parser, by its command line."""
    for name, module in MODULES.items():
        parser = module.parse.__globals__["make_parser"]()
        yield name, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((f"{name} {key}", one) for key, one in action.choices.items())


PARSERS = dict(parsers())
COMMANDS = [name for name in PARSERS if " " in name]


def options(command: str) -> list[argparse.Action]:
    """All that a command takes: a word of each is read by its type."""
    return [one for one in PARSERS[command]._actions if one.nargs != 0]


def line(command: str, option: argparse.Action, word: str, there: Path) -> list[str]:
    """A command line in which all is right but for one word."""
    argv = command.split()[1:]
    right = {"URL": "tcp://127.0.0.1:7300"}
    positional = [
        word if one is option else right.get(str(one.metavar), str(there))
        for one in options(command)
        if not one.option_strings
    ]
    if option.option_strings:
        argv.append(f"{option.option_strings[0]}={word}")
    return [*argv, "--", *positional] if positional else argv


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_word_is_refused_in_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in options(command):
        name = option.option_strings[0] if option.option_strings else str(option.metavar)
        refused = 0
        for word in WORDS:
            found = parse(line(command, option, word, tmp_path), command)
            if isinstance(found, argparse.Namespace):
                assert is_what_it_says(option, word, getattr(found, option.dest)), (name, word)
                continue
            assert found == 2
            refused += 1
            shown = capsys.readouterr().err
            assert shown.count("\n") == 1, shown
            assert shown.startswith(f"{command}: argument {name}: "), shown
            assert shown.endswith(f"; see {command} --help\n"), shown
            assert "<" not in shown.replace(word, ""), shown
            if option.choices is not None:
                assert all(str(one) in shown for one in option.choices), shown
            elif isinstance(option.type, NumberArgument):
                assert f"wanted {option.type}, got {word!r}" in shown
            else:
                assert "wanted " in shown
        assert refused or option.type is None, f"{command} {name} takes any word"


def parse(argv: list[str], command: str) -> argparse.Namespace | object:
    """What was read, or the exit status."""
    try:
        return PARSERS[command.split()[0]].parse_args(argv)
    except SystemExit as end:
        return end.code


def is_what_it_says(option: argparse.Action, word: str, found: object) -> bool:
    """Whether a word that was taken is a value that the option takes."""
    if isinstance(option.type, NumberArgument):
        value = option.type.kind(word)
        return found == value and option.type.least <= value <= option.type.most
    taken = found[-1] if isinstance(found, list) else found  # of one that may be repeated
    return taken == word and (option.choices is None or word in option.choices)


def test_the_free_words_are_paths_and_names() -> None:
    free = {
        name
        for command in COMMANDS
        for option in options(command)
        if option.type is None and option.choices is None
        for name in (option.option_strings or [str(option.metavar)])
    }
    files = {
        "--against",
        "--config",
        "--digests",
        "--directory",
        "--environments",
        "--json",
        "--keys",
        "--keys-from",
        "--output",
        "--prefix",
        "--writers",
        "A",
        "AFTER",
        "B",
        "BEFORE",
        "DIR",
        "DIRECTORY",
        "FILE|URL",
    }
    assert free == {*files, "--key", "-o", "--row", "--serve", "NAME", "URL"}


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        ("", "kvlink-bench: the following arguments are required: COMMAND; see"),
        ("latencyy", "kvlink-bench: argument COMMAND: invalid choice: 'latencyy' (choose from"),
        ("latency --round 5", "latency: there is no option --round, did you mean --rounds?; see"),
        ("latency --round=5", "latency: there is no option --round=5, did you mean --rounds?; see"),
        ("latency 5", "kvlink-bench latency: there is no option 5; see kvlink-bench latency"),
        ("latency --rounds", "kvlink-bench latency: argument --rounds: expected one argument; see"),
        ("many --bytes 4095", "argument --bytes: wanted an even number from 2 to 1,000,000,000"),
        ("latency --rounds 0", "--rounds: wanted a whole number from 1 to 1,000,000,000, got '0'"),
        (
            "append-stream --rate nan",
            "argument --rate: wanted a number a second from 0.001 to 1,000,000",
        ),
        ("stream --connector carrier", "argument --connector: invalid choice: 'carrier' (choose"),
        ("growing --reader steps", "kvlink-bench: growing is now append-stream; use kvlink-bench"),
        ("first", "first has moved; use python benchmarks/first_transfer.py of a checkout"),
        ("keygen keys a", "kvlink-bench: keygen has moved; use kvlink keygen DIRECTORY NAME"),
    ],
)
def test_wrong_usage_is_one_line(argv: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.parse(argv.split())
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert shown in captured.err
    assert (captured.err.count("\n"), captured.out) == (1, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_everything_is(command: str) -> None:
    parser = PARSERS[command]
    shown = " ".join(parser.format_help().split())
    assert " ".join(STATUS.split()) in shown
    for option in parser._actions:
        if option.help != argparse.SUPPRESS:
            assert option.help, f"{command} {option.option_strings} has no help"
            assert len(option.help.split()) > 2, option.help
            assert option.nargs == 0 or option.metavar or option.choices or option.dest == "url"
    if command.startswith("kvlink-bench"):
        assert {one.title for one in parser._action_groups if one._group_actions} >= {"output"}


@pytest.mark.parametrize("name", setups.COMMANDS)
def test_every_option_of_a_measurement_is_in_its_setup(name: str) -> None:
    names = {field.name for field in dataclasses.fields(setups.COMMANDS[name])}
    if "shape" in names:
        names |= {"preset", "layers", "tokens", "heads", "head_dim", "dtype"}
    taken = {one.dest for one in PARSERS[f"kvlink-bench {name}"]._actions}
    assert taken - names == {"help", "json"}


@pytest.mark.parametrize("command", [*MODULES, *COMMANDS])
def test_the_examples_of_a_help_are_right(command: str, tmp_path: Path) -> None:
    examples = [one for one in str(PARSERS[command].epilog).splitlines() if one.startswith("  ")]
    assert examples
    for example in examples:
        name, *argv = shlex.split(example)
        if "--help" not in argv:
            directories = ("models/BAGEL-7B-MoT", "traces")
            own = [str(tmp_path) if one in directories else one for one in argv]
            assert MODULES[name].parse(own)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for command, parser in PARSERS.items():
        wide = [one for one in parser.format_help().splitlines() if len(one) > columns]
        assert columns == 40 or not wide, (command, wide)
        assert all(one.startswith("  ") for one in wide), "an example, or the table of presets"


def test_the_choices_are_those_of_the_library() -> None:
    assert tuple(RECEIVE) == setups.READERS
    for name in {*COPIERS} - {"pinned"}:  # this one needs a device
        assert isinstance(named_copier(name), Copier)
    with pytest.raises(ValueError) as caught:
        named_copier("elves")
    assert {name for name in COPIERS if repr(name) in str(caught.value)} == {*COPIERS}
    assert str(caught.value).count("'") == 2 * len(COPIERS) + 2


# What a command imports

RUN = """
import sys
from {module} import {name}
try:
    status = {call}
except SystemExit as error:
    status = error.code
print(status, *sorted({{one.partition(".")[0] for one in sys.modules}} & {{*{slow}}}), sep=",")
"""
SLOW = ("torch", "numpy", "zmq")


@pytest.mark.parametrize(
    ("command", "status", "shown"),
    [
        ("kvlink --version", 0, f"kvlink {__version__}"),
        ("kvlink-bench --version", 0, f"kvlink-bench {__version__}"),
        ("kvlink --help", 0, "usage: kvlink "),
        ("kvlink keygen --help", 0, "usage: kvlink keygen"),
        ("kvlink-bench --help", 0, "usage: kvlink-bench "),
        ("kvlink-bench latency --help", 0, "usage: kvlink-bench latency"),
        ("kvlink check-checkpoint /nowhere", 2, "wanted a directory"),
        ("kvlink-bench many --bytes odd", 2, "wanted an even number"),
        ("kvlink-bench many --json /nowhere/x", 2, "--json /nowhere/x: make the directory"),
        ("kvlink keygen {there} ''", 2, "1 to 64 letters"),
    ],
)
def test_a_command_without_tensors_imports_no_torch(
    command: str, status: int, shown: str, tmp_path: Path
) -> None:
    name, *argv = shlex.split(command.format(there=tmp_path))
    module = {"kvlink": "omni_kvlink.cli.main", "kvlink-bench": "omni_kvlink.bench.cli"}[name]
    code = RUN.format(module=module, name="main", call="main()", slow=SLOW)
    done = start(code, *argv)
    assert shown in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == str(status), "a slow package was imported"
    assert status == 0 or done.stderr.count("\n") == 1


def test_keygen_needs_no_torch(tmp_path: Path) -> None:
    call = f"run(['keygen', {str(tmp_path)!r}, 'a'])"
    code = RUN.format(module="omni_kvlink.cli.commands", name="run", call=call, slow=SLOW)
    assert start(code).stdout.splitlines()[-1] == "0,zmq"
    assert {one.name for one in tmp_path.iterdir()} == {"a.secret", "a.public"}


def start(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    with new_interpreters():
        return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
