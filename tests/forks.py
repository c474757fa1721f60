"""Scripts that need a fresh process each, but not an import of PyTorch each: they run in forks of one that did the imports."""

import json
import pathlib
import subprocess
import sys
import tempfile

SERVER = """
import json, os, runpy, signal, sys
{imports}
while True:
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    script, folder, output, limit = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for stream, other in ((0, os.open(os.devnull, os.O_RDONLY)), (1, written), (2, written)):
    os.dup2(other, stream)
signal.alarm(limit)
os.chdir(folder)
sys.argv, sys.path[0] = [script], folder
runpy.run_path(script, run_name="__main__")
"""


class Forks:
    """A process that has run `imports`, in the repository's root, and forks for every script.

    The imports must start no thread. Close it, or use it as a context manager.
    """

    def __init__(self, imports, env=None):
        command = [sys.executable, "-c", SERVER.format(imports=imports)]
        root = pathlib.Path(__file__).parents[1]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=root, text=True)

    def run(self, script, folder, limit=600):
        """(exit code, what it wrote to both streams) of the script at a path, run in a folder as `python script` is.

        After `limit` seconds it is ended, with the exit code -14.
        """
        with tempfile.TemporaryDirectory() as kept:
            output = pathlib.Path(kept, "output")
            self.server.stdin.write(json.dumps([str(script), str(folder), str(output), limit]) + "\n")
            self.server.stdin.flush()
            code = self.server.stdout.readline()
            assert code, "the process that forks has ended"
            return int(code), output.read_text()

    def close(self):
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
