"""LitServe, as its documentation has it for batches: POST /predict."""

import litserve
import torch
from models import ROWS, asked, build

MODEL, PORT = asked()


class Api(litserve.LitAPI):
    def setup(self, device):
        self.net = build(MODEL)

    def decode_request(self, request):
        return torch.tensor(request["input"])

    def batch(self, inputs):
        return torch.stack(inputs)

    def predict(self, x):
        with torch.inference_mode():
            return self.net(x)

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return {"output": output.tolist()}


if __name__ == "__main__":
    # With no delay at all its worker spins; a millisecond is the least that lets it rest.
    server = litserve.LitServer(Api(max_batch_size=ROWS, batch_timeout=0.001), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=PORT, num_api_servers=1, log_level="error", generate_client_file=False)
