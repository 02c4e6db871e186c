# serve.py: the course starts `uvicorn serve:app`. uvicorn imports this file before it opens its port, and the import
# replaces the process by bin/serve, which answers GET / and POST /predict on uvicorn's host and port.
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
OPTIONS = []  # for bin/serve, e.g. ["--predict-max-tokens", "256", "--kv-dtype", "fp8"]


def given(name, default):
    """The value of uvicorn's option --NAME, else of its environment variable, else its default."""
    value = os.environ.get("UVICORN_" + name.upper(), default)
    for word, following in zip(sys.argv, sys.argv[1:] + [""]):
        if word == "--" + name:
            value = following
        elif word.startswith("--" + name + "="):
            value = word.split("=", 1)[1]
    return value


def command():
    words = [HERE + "/bin/serve", HERE + "/model", "--host", given("host", "127.0.0.1"), "--port", given("port", "8000")]
    if os.path.isdir(HERE + "/adapter"):
        words += ["--adapter", HERE + "/adapter"]
    if os.path.isfile(HERE + "/system.txt"):
        words += ["--predict-system", HERE + "/system.txt"]
    return words + OPTIONS


os.environ["LD_LIBRARY_PATH"] = HERE + "/lib:" + os.environ.get("LD_LIBRARY_PATH", "")
os.execv(HERE + "/bin/serve", command())
