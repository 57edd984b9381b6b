"""transformers is imported by one thread at a time."""

import subprocess
import sys

SCRIPT = """
from concurrent.futures import ThreadPoolExecutor
from packhouse.worker.libraries import auto_tokenizer, chat_renderer

with ThreadPoolExecutor(8) as pool:
    calls = [pool.submit(function) for function in [auto_tokenizer, chat_renderer] * 4]
assert len({call.result() for call in calls}) == 2
"""


def test_threads_that_need_it_at_once_all_get_it() -> None:
    """Beside one another, its lazy modules are half imported: 'cannot import name AutoTokenizer'."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
