"""The pasted tables of docs/your-server.md give what the page says. `python -m tests.test_docs_tables` writes it anew."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "your-server.md"
TABLE = re.compile(
    r'<!-- table: begin -->\n```text title="(?P<name>[^"\n]+)"\n(?P<text>[^`]+)```\n\n```\ntreeopt (?P<words>[^\n]+)\n```\n\n```\n(?P<output>[^`]*)```\n'
    r"<!-- table: end -->",
    re.DOTALL,
)


def output_of(table: re.Match[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, table["name"]).write_text(table["text"], encoding="utf-8")
        words, environment = table["words"].split(), {**os.environ, "COLUMNS": "100"}
        done = subprocess.run(
            [sys.executable, "-m", "treeopt", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    return "".join(line.rstrip() + "\n" for line in done.stdout.splitlines())


def test_pasted_tables_give_what_the_page_says():
    tables = list(TABLE.finditer(PAGE.read_text("utf-8")))
    assert len(tables) == 3
    assert [table["output"] for table in tables] == [output_of(table) for table in tables]


if __name__ == "__main__":
    page = TABLE.sub(
        lambda table: table[0].replace(f"```\n{table['output']}```\n<!--", f"```\n{output_of(table)}```\n<!--"),
        PAGE.read_text("utf-8"),
    )
    PAGE.write_text(page, encoding="utf-8")
