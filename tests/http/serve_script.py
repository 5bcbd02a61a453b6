"""A service in a process of its own, for signals: `serve_script.py DATA_DIR READY_FILE SECONDS_PER_TOKEN`."""

import sys
from pathlib import Path

from served import MODEL, ScriptedEngine

from tandem.serve.http.run import Listen, serve_forever
from tandem.serve.http.service import create_app
from tandem.serve.openai.service import openai_service
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer

if __name__ == "__main__":
    renderer = Renderer(byte_tokenizer())
    engine = ScriptedEngine(renderer)
    engine.script, engine.pause_s = "x" * 100, float(sys.argv[3])
    listen = Listen(Path(sys.argv[1]), ready_file=Path(sys.argv[2]))
    service = openai_service(engine, renderer, model_id=MODEL, context=256, num_ids=len(renderer.tokenizer))
    serve_forever(create_app(service, token=listen.token(), hosts=listen.hosts), listen)
