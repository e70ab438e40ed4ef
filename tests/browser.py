import functools
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

_FRAME = """<title>waits</title><iframe src="/{page}" width="{width}" height="900"></iframe>
<script>
document.querySelector("iframe").onload = event => {{
  const page = event.target.contentDocument, root = page.documentElement;
  const answer = (({script})(page, root, event.target.contentWindow));
  document.title = "answer " + JSON.stringify(answer);
}};
</script>"""


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def ask(folder: Path, address: str, page: str, script: str, width: int, dark: bool) -> Any:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    frame = folder / f"frame-{width}-{dark}-{page.replace('/', '-')}"
    frame.write_text(_FRAME.format(page=page, width=width, script=script))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [chromium, *options, scheme, "--window-size=1400,1000", "--dump-dom"]
    dom = subprocess.run(
        [*command, f"{address}/{frame.name}"], capture_output=True, text=True, timeout=120
    ).stdout
    found = re.search(r"<title>answer (.*?)</title>", dom, re.DOTALL)
    assert found is not None, dom[:500]
    return json.loads(unescape(found[1]))
