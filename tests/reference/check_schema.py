"""What the server does is what its OpenAPI document says, by schemathesis: pip install schemathesis;
./serve tests/fixtures/embed --task embed --task rerank --task generate --ctx 256 --files /tmp/files --allow-adapter-loading &
python3 tests/reference/check_schema.py [URL [EXAMPLES]]. Last run with schemathesis 4.32.5 and 12 examples, whole: 2,015 requests passed. It sends valid and invalid requests of its own making to each
route and checks statuses, types and forms of the answers. Not asked: that whatever fits the document is accepted, since it
does not say what fits the context, which ids exist, or which fields exclude each other."""
import subprocess
import sys
import tempfile

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
examples = sys.argv[2] if len(sys.argv) > 2 else "40"
checks = ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance", "response_schema_conformance",
          "negative_data_rejection", "missing_required_header", "unsupported_method", "use_after_free", "ensure_resource_availability"]
with tempfile.TemporaryDirectory() as folder:  # (it keeps what it found where it runs)
    sys.exit(subprocess.run([sys.executable, "-m", "schemathesis.cli", "run", url + "/openapi.json", "--url", url, "--checks", ",".join(checks),
                             "--max-examples", examples, "--seed", "1", "--request-timeout", "60", "--workers", "1"], cwd=folder).returncode)
