"""The messages whose bytes are kept in tests/contract/golden: one or more of every kind.

A golden file is what a release once sent. None is ever made again; to add one, add its message here and run
`python -m tests.contract.golden_messages`, which writes the files that do not exist yet.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import Message
from target_wire.v1 import target_pb2 as pb

GOLDEN = Path(__file__).parent / "golden"

VERSION = pb.TargetVersion(number=3, digest="0123456789abcdef0123456789abcdef")
BODY = bytes(range(256)) * 2
TENSOR = pb.TensorSpec(name="hidden_states", dtype=pb.DTYPE_BFLOAT16, shape=[2, 2, 64])
HEADER = pb.BatchHeader(
    request_id=300,
    version=VERSION,
    tensor=TENSOR,
    payload_bytes=512,
    frame_count=2,
    finite=True,
    replica_index=4,
)
BATCH = pb.BatchRequest(request_id=300, sequence_lengths=[1, 3], token_ids=[0, 49_151, 5, 300])
MODEL = pb.TargetModel(
    architecture="LlamaForCausalLM",
    model_type="llama",
    hidden_size=576,
    layer_count=30,
    vocab_size=49_152,
    tie_word_embeddings=True,
    dtype=pb.DTYPE_BFLOAT16,
    max_position_count=8192,
    tokenizer_digest="fedcba9876543210fedcba9876543210",
    name="SmolLM2-135M-Instruct",
)
REPLICAS = [
    pb.Replica(index=0, devices=["cuda:0"], state=pb.REPLICA_STATE_SERVING, port=50_052),
    pb.Replica(index=1, address="unix:/run/target/1", devices=["cpu"], state=pb.REPLICA_STATE_LOADING, restart_count=2),
]


def request(**message: Message) -> pb.StreamHiddenStatesRequest:
    return pb.StreamHiddenStatesRequest(**message)


def response(**message: Message) -> pb.StreamHiddenStatesResponse:
    return pb.StreamHiddenStatesResponse(**message)


MESSAGES: dict[str, Message] = {
    "describe_request": pb.DescribeTargetRequest(),
    "describe_response": pb.DescribeTargetResponse(
        protocol_version=1,
        model=MODEL,
        version=VERSION,
        replicas=REPLICAS,
        max_batch_token_count=16_384,
        max_sequence_token_count=4096,
    ),
    "swap_request": pb.SwapTargetRequest(
        request_id="3f1e", checkpoint="tuned/step-200", dry_run=True, wait_for_trainer=True
    ),
    "swap_progress": pb.SwapTargetResponse(
        stage=pb.SWAP_STAGE_FOLLOW,
        replicas=[
            pb.SwapReplica(index=0, read_bytes=1 << 33, total_bytes=1 << 34, committed=True),
            pb.SwapReplica(index=1, total_bytes=1 << 34),
        ],
        version=VERSION,
        checkpoint="/models/tuned/step-200",
        lagging_session_count=2,
    ),
    "describe_response_after_swaps": pb.DescribeTargetResponse(
        protocol_version=1,
        version=VERSION,
        replicas=[pb.Replica(index=1, stats=pb.ReplicaStats(lagging_session_count=3, swap_pause_seconds=0.25))],
        earlier_versions=[
            pb.TargetVersion(number=2, digest="2" * 32),
            pb.TargetVersion(number=1, digest="1" * 32),
        ],
    ),
    "stream_open": request(
        open=pb.Open(
            protocol_version=1,
            taps=[27, 1],
            dtype=pb.DTYPE_BFLOAT16,
            max_batch_token_count=16_384,
            window_bytes=1 << 33,
            expected_version=VERSION,
            client_name="run-7/rank-0",
        )
    ),
    "stream_credit": request(credit=pb.Credit(granted_bytes=1 << 40)),
    "stream_batch_request": request(batch_request=BATCH),
    "stream_cancel": request(cancel=pb.Cancel(request_id=300)),
    "stream_opened": response(
        opened=pb.Opened(replica_index=4, version=VERSION, bytes_per_token=2304, dtype=pb.DTYPE_BFLOAT16)
    ),
    "stream_batch_header": response(batch_header=HEADER),
    "stream_batch_failed": response(
        batch_failed=pb.BatchFailed(
            request_id=300,
            code=3,
            reason="TOKEN_OUT_OF_RANGE",
            detail="token_ids 49152: every id must be in [0, 49151]",
        )
    ),
    "stream_batch_frame": response(
        batch_frame=pb.BatchFrame(request_id=300, offset_bytes=70_000, crc32c=0xDEADBEEF, body=BODY)
    ),
    "stream_batch_frame_first": response(batch_frame=pb.BatchFrame(crc32c=0x01020304, body=BODY[:100])),
    "stream_open_shared_memory": request(
        open=pb.Open(protocol_version=1, taps=[1], max_batch_token_count=64, window_bytes=1 << 26, shared_memory=True)
    ),
    "stream_opened_shared_buffer": response(
        opened=pb.Opened(
            bytes_per_token=2304,
            dtype=pb.DTYPE_BFLOAT16,
            shared_buffer=pb.SharedBufferOffer(
                socket_name="target-server-00c0ffee00c0ffee", token="0123456789abcdef" * 2, size_bytes=1 << 25
            ),
        )
    ),
    "stream_shared_buffer_attached": request(shared_buffer_attached=pb.SharedBufferAttached()),
    "stream_shared_buffer_released": request(
        shared_buffer_released=pb.SharedBufferReleased(released_bytes=(1 << 40) + 1)
    ),
    "stream_shared_frame": response(
        shared_frame=pb.SharedFrame(
            request_id=300, offset_bytes=70_000, crc32c=0xDEADBEEF, position_bytes=(1 << 40) + 1, size_bytes=2_094_336
        )
    ),
    "describe_response_shared_memory": pb.DescribeTargetResponse(
        replicas=[
            pb.Replica(stats=pb.ReplicaStats(shared_memory_session_count=2, shared_memory_problem="no memory")),
        ],
    ),
    "capture_request": pb.CaptureHiddenStatesRequest(taps=[0, 29], batch=BATCH),
    "capture_response": pb.CaptureHiddenStatesResponse(header=HEADER, crc32c=0xDEADBEEF, body=BODY),
    "fetch_head_request": pb.FetchHeadRequest(version=VERSION),
    "fetch_head_description": pb.FetchHeadResponse(
        head=pb.HeadDescription(
            version=VERSION,
            tensors=[
                pb.TensorSpec(name="embed_tokens", dtype=pb.DTYPE_BFLOAT16, shape=[49_152, 576]),
                pb.TensorSpec(name="final_norm", dtype=pb.DTYPE_BFLOAT16, shape=[576]),
            ],
            tie_word_embeddings=True,
            embedding_scale=24.0,
            logit_softcap=30.0,
            logit_scale=0.125,
            final_norm_epsilon=1e-6,
        )
    ),
    "fetch_head_frame": pb.FetchHeadResponse(
        frame=pb.HeadFrame(tensor_index=1, offset_bytes=1 << 21, crc32c=0xCAFEF00D, body=BODY)
    ),
}


def main() -> None:
    """Writes what is missing."""
    GOLDEN.mkdir(exist_ok=True)
    for name, message in MESSAGES.items():
        file = GOLDEN / f"{name}.bin"
        if not file.exists():
            file.write_bytes(message.SerializeToString(deterministic=True))
            print(f"wrote {file.name}")


if __name__ == "__main__":
    main()
