import re
import shlex
from pathlib import Path

import pytest

from sgl_eagle.cli.frame.arguments import command_parser, reject_unknown_options
from sgl_eagle.cli.frame.commands import COMMANDS, load_command
from sgl_eagle_harness.types import TreeLimits

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/lm-head.md",
    "docs/sglang.md",
    "docs/tree-parameters.md",
    "kernels/README.md",
    "reports/README.md",
]


def shell_lines(text):
    joined = text.replace("\\\n", " ")
    return re.findall(r"^(?:example:)? *(sgl-eagle .*)", joined, re.MULTILINE)


def build_parser(name):
    command = load_command(name)
    parser = command_parser(name, command.HELP)
    command.add_arguments(parser)
    return parser


def require_parses(line):
    _, name, *argv = shlex.split(line, comments=True)
    parser = build_parser(name)
    reject_unknown_options(parser, argv)
    parser.parse_args(argv)


@pytest.mark.reference
def test_commands_in_the_readme_parse():
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in shell_lines(block)]
    assert len(lines) >= 4
    for line in lines:
        require_parses(line)


@pytest.mark.reference
@pytest.mark.parametrize("name", COMMANDS)
def test_examples_in_the_help_parse(name):
    examples = shell_lines(build_parser(name).epilog or "")
    assert examples
    for line in examples:
        require_parses(line)


def test_readme_lists_exactly_the_commands():
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(COMMANDS)


def test_contributing_and_makefile_run_the_same_five_lines():
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    documented = re.search(
        r"```bash\n(ruff .*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL
    )
    assert recipe[1].replace("\t$(BIN)/", "") == documented[1]
    assert len(documented[1].splitlines()) == 5


def test_tree_page_names_the_largest_number_of_draft_tokens():
    page = (ROOT / "docs/tree-parameters.md").read_text()
    rows = [
        tuple(map(int, row)) for row in re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \|", page, re.M)
    ]
    assert len(rows) == 5
    for num_steps, topk, largest in rows:
        limits = TreeLimits(num_steps=num_steps, topk=topk, num_draft_tokens=2)
        assert limits.largest_num_draft_tokens == largest


@pytest.mark.parametrize("page", PAGES)
def test_links_inside_the_repository_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert missing == []
