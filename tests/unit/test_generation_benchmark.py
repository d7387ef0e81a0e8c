"""What the benchmark of generation counts: which gaps, which runs, and which way round a ratio is."""

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from benchmarks.context_cost import Cost, context_claims
from benchmarks.dialogues import Dialogues, skill_questions
from benchmarks.generation import worst
from benchmarks.interference import Interference, gaps_within, interference_claims
from benchmarks.parallel import Together, parallel_claims
from benchmarks.report import Report
from benchmarks.reuse import Turns, reuse_claims
from benchmarks.speculation import Answers, Round, speculation_claims
from benchmarks.streaming import AnswerError, Generation, complete
from benchmarks.undisturbed import MAX_FOREIGN_CPUS, Bench, Measured
from gateway.tokenizer import Tokenizer
from shared.demo_model import DEMO_MODEL_PATH
from shared.gguf.model import GGUFModel


@pytest.fixture
def server() -> Iterator[str]:
    """Streams three pieces of text for four tokens, and goes on for as long as somebody listens where more
    are asked for."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            for _ in range(3 if body["max_tokens"] <= 8 else 1_000_000):
                try:
                    self._send({"choices": [{"text": "y"}]})
                except OSError:
                    return
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 4}
            self._send({"choices": [], "usage": usage, "timings": {"ignore_eos": body["ignore_eos"]}})

        def _send(self, event: object) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


def test_an_answer_may_end_by_itself(server: str) -> None:
    """Where it may not, fewer tokens than were asked for would be taken for a faster answer."""
    answer = complete(server, [1, 2], 8, may_end=True)
    assert (answer.num_tokens, answer.text, answer.timings) == (4, "yyy", {"ignore_eos": False})
    assert complete(server, [1, 2], 4).timings == {"ignore_eos": True}
    with pytest.raises(AnswerError, match=r"2 and 8 tokens were asked for, \(2, 4\) counted"):
        complete(server, [1, 2], 8)


def test_an_answer_is_broken_off(server: str) -> None:
    """One that runs while something else is measured must not go on beside what comes next."""
    stop = threading.Event()
    stop.set()
    assert complete(server, [1, 2], 9, stop=stop).text == "y"


def test_turns_of_a_conversation() -> None:
    """A second turn that does not begin with the first one would find nothing that is kept."""
    with GGUFModel(DEMO_MODEL_PATH) as model:
        first, second = (Dialogues(model, seed=1) for _ in range(2))
        prompt = first.begin(200)
        assert len(prompt) == 200
        assert prompt == second.begin(200)
        assert prompt[:20] != first.begin(200)[:20]
        later = second.go_on(prompt, "Paris.", 20)
        assert later[:200] == prompt
        assert 205 < len(later) < 250
        tokenizer = Tokenizer.from_metadata(model.metadata, model.name)
    questions = skill_questions(tokenizer, 0, 3)
    assert len({tuple(question) for question in questions}) > 8
    assert questions != skill_questions(tokenizer, 1, 3)


def test_claims_of_speculation() -> None:
    """Tokens of a window that are accepted are those of drafts: the one that the trunk gives is not."""
    plain, drafting = Answers(), Answers()
    plain.add(_answer("yes", predicted_n=11, predicted_ms=10.0))
    drafting.add(
        _answer(
            "yes",
            predicted_n=11,
            predicted_ms=5.0,
            windows_n=4,
            draft_n=8,
            draft_n_accepted=6,
            draft_ms=1.0,
            drafts={"prediction": {"n": 8, "accepted_n": 6}},
        )
    )
    both = Round(plain, drafting)
    assert (both.num_different, plain.num_windows) == (0, 10)
    found = speculation_claims([both])
    assert found["speculation_ratio"] == pytest.approx(2.0)
    assert found["plain_tokens_per_s"] == pytest.approx(1000.0)
    assert found["accepted_per_window"] == found["accepted_per_window_prediction"] == pytest.approx(1.5)
    assert found["accepted_share"] == pytest.approx(0.75)
    assert found["draft_ms_share"] == pytest.approx(0.2)
    drafting.texts[0] = "no"
    assert both.num_different == 1


def _answer(text: str, **timings: object) -> Generation:
    return Generation(3, 11, (0.1,), text, timings=timings)


def test_claims_of_reuse() -> None:
    """A ratio to llama.cpp is of second turns; a fraction is of one's own first turn."""
    found = reuse_claims([Turns(2.0, 0.1, 2047, 30)], [Turns(4.0, 0.3, 2000, 77)])
    assert found["turn2_ttft_fraction"] == pytest.approx(0.05)
    assert found["llama_cpp_turn2_ttft_fraction"] == pytest.approx(0.075)
    assert found["turn2_vs_llama_cpp"] == pytest.approx(3.0)
    assert found["turn2_read_tokens"] == 30


def test_claims_of_parallel_requests() -> None:
    """Bytes of one request at a time, over those of several: more is a larger gain."""
    ours = {1: [Together(1, 100, 10.0, 2000)], 4: [Together(4, 400, 10.0, 4000)]}
    theirs = {1: [Together(1, 100, 20.0, 0)], 4: [Together(4, 400, 20.0, 0)]}
    found = parallel_claims(ours, theirs)
    assert (found["parallel_1_ratio"], found["parallel_4_ratio"]) == (2.0, 2.0)
    assert found["parallel_4_tokens_per_s"] == 40.0
    assert found["shared_reads_gain_4"] == 2.0
    assert "shared_reads_gain_1" not in found


def test_gaps_of_running_answers() -> None:
    """Those that a prompt begins or ends in are among them; pieces that came together are not."""
    answer = Generation(1, 5, (1.0, 2.0, 2.00001, 3.0, 4.0), asked_at=10.0)
    assert gaps_within(answer, 0.0, 99.0) == pytest.approx([1.0, 0.99999, 1.0])
    assert gaps_within(answer, 12.5, 12.6) == pytest.approx([0.99999])
    run = Interference((0.01,), (0.1, 0.2), 1.0, 2.0)
    found = interference_claims([run], [])
    assert found["itl_p95_ms_during_prefill"] == pytest.approx(195.0)
    assert found["itl_p95_ms_calm"] == pytest.approx(10.0)
    assert not any(name.startswith("llama_cpp") for name in found)


def test_claims_of_contexts() -> None:
    """Against the shortest, whichever comes first."""
    found = context_claims({8192: [Cost(0.003, 1.0)], 1024: [Cost(0.002, 1.0)]})
    assert found == pytest.approx(
        {"context_8k_ms_per_token": 3.0, "context_1k_ms_per_token": 2.0, "context_8k_ratio": 1.5}
    )


def test_the_worst_model_is_what_is_claimed() -> None:
    """For ratios the smaller, for costs the larger one."""
    found = worst(
        {
            "demo": {"parallel_4_ratio": 2.0, "context_8k_ratio": 1.5, "turn2_vs_llama_cpp": 1.0},
            "slice": {"parallel_4_ratio": 1.5, "context_8k_ratio": 1.1, "turn2_vs_llama_cpp": 3.0},
        }
    )
    assert (found["parallel_4_ratio"], found["context_8k_ratio"], found["turn2_vs_llama_cpp"]) == (
        1.5,
        1.5,
        1.0,
    )
    assert found["parallel_4_ratio_demo"] == 2.0


def test_disturbed_measurements_count_where_nothing_else_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And then the report says so."""
    report = Report("generation", {})
    bench = Bench({0}, 0.0, report)
    quiet, disturbed = Measured(1, 0.0), Measured(2, MAX_FOREIGN_CPUS + 0.4)
    assert bench.counted("reuse", [disturbed, quiet]) == [1]
    assert report.notes == []
    assert bench.counted("reuse", [disturbed]) == [2]
    assert report.notes == ["DISTURBED: reuse, every time, at least by 0.50 busy CPUs"]
    capsys.readouterr()
