"""What mkdocs does not do by itself; named in mkdocs.yml, and no page of the site."""

import re
from typing import Any

NO_DEFAULT = re.compile(r"<td>(<code>Sentinel\.UNSET</code>|<code>None</code>|None)</td>")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Mend what mkdocs-click makes of the commands: examples in one line, defaults that are none."""
    if page.file.src_uri != "commands.md":
        return html
    html = re.sub(r"<p>Example:\n(.*?)</p>", _example, html, flags=re.DOTALL)
    html = re.sub(r"<p>(treeopt run +the whole.*?)</p>", r"<pre><code>\1\n</code></pre>", html, flags=re.DOTALL)
    return NO_DEFAULT.sub("<td></td>", html)


def _example(found: re.Match[str]) -> str:
    lines = "\n".join(line.strip() for line in found[1].splitlines())
    return f"<p>Example:</p>\n<pre><code>{lines}\n</code></pre>"
