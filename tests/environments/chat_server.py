"""A server on a socket that speaks chat completions, with a script for a model."""

import http.server
import json
import threading


class Server:
    """Chat completions with scripted answers; keeps what was asked."""

    def __init__(self, script):
        """Takes a function of the messages and of how often it was asked.

        It returns a text, an assistant's message, or a status and a body.
        """
        self.asked = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                size = int(self.headers["Content-Length"])
                asked = json.loads(self.rfile.read(size))
                outer.asked.append((self.path, asked, dict(self.headers)))
                said = script(asked["messages"], len(outer.asked))
                code, body = (
                    said if isinstance(said, tuple) else (200, completion(said))
                )
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self):
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def completion(said):
    message = {"role": "assistant", "content": said} if isinstance(said, str) else said
    return json.dumps({"choices": [{"message": message}]}).encode()
