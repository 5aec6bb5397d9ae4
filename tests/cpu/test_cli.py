"""The command line as a person and a program meet it, on a tiny model with a chat template."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import TinyShape, hf_tensors, write_gguf
from typer.testing import CliRunner

from subten import cli, cli_bench
from subten.bench.shapes import SHAPES
from subten.cli import app
from subten.codecs import CODECS
from subten.core import ConfigError
from subten.device import detect

runner = CliRunner()
DEVICE = "cpu"
UNPLACED = ("--help", "--device")
COMMANDS = [
    [],
    ["generate"],
    ["chat"],
    ["info"],
    ["plan"],
    ["eval"],
    ["eval", "kv"],
    ["eval", "keys"],
    ["bench"],
    ["bench", "latency"],
    ["bench", "kernels"],
    ["bench", "serve"],
    ["serve"],
    ["train"],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A two-layer model of 30,000 random weights, context 256."""
    shape = TinyShape()
    path = tmp_path_factory.mktemp("cli") / "tiny.gguf"
    return str(write_gguf(path, shape, hf_tensors(shape)))


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without a chat template."""
    shape = TinyShape()
    path = tmp_path_factory.mktemp("cli") / "plain.gguf"
    return str(write_gguf(path, shape, hf_tensors(shape), chat_template=None))


@pytest.fixture(autouse=True)
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every command that has a device runs on the one under test."""
    name = str(request.config.getoption("--device"))
    monkeypatch.setattr(f"{__name__}.DEVICE", name)
    return name


def run(*args: str, stdin: str | None = None) -> Any:
    command = list(args)
    if args[0] in ("generate", "chat", "info", "eval", "bench") and not {*args} & {*UNPLACED}:
        command += ["--device", DEVICE]
    result = runner.invoke(app, command, input=stdin, prog_name="subten")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_json(*args: str) -> dict[str, Any]:
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 1, lines
    value = json.loads(lines[0])
    assert isinstance(value, dict)
    return value


def refusal(*args: str, stdin: str | None = None) -> str:
    """The one line that a refused command leaves on stderr."""
    result = run(*args, stdin=stdin)
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("subten: error: ")
    return lines[0].removeprefix("subten: error: ")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    _, _, examples = result.stdout.partition("Example")
    assert f" {' '.join(['subten', *command])} " in f"{' '.join(examples.split())} "
    assert "python -m" not in examples


@pytest.mark.parametrize("group", [[], ["eval"], ["bench"]], ids=" ".join)
def test_the_list_of_commands_is_not_cut_off(group):
    listed = run(*group, "--help").stdout.partition("Commands:")[2]
    assert listed.strip()
    assert "..." not in listed


@pytest.mark.parametrize("command", [["plan"], ["bench", "latency"], ["bench", "kernels"]])
def test_help_names_every_shape(command):
    shown = run(*command, "--help").stdout.partition("Options:")[2]
    shown = "".join(shown.split())  # lines break within a name, too
    assert all(name in shown for name in SHAPES)


def test_help_and_version_import_no_torch():
    code = (
        "import sys; from subten.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules), 'heavy imports'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert run("--version").stdout.startswith("subten ")


def test_generate_json_is_one_object_with_what_a_program_needs(model):
    value = run_json("generate", "hat", "--model", model, "--max-tokens", "5", "--json")
    assert value["model"] == model
    assert value["kv_cache_dtype"] == "bf16"
    assert value["device"].startswith(DEVICE)
    assert len(value["token_ids"]) == value["usage"]["completion_tokens"] <= 5
    assert value["finish_reason"] in ("stop", "length")
    assert isinstance(value["text"], str)
    assert value["ttft_ms"] > 0
    # 2 layers x 2 KV heads x K and V x 16 values x 2 bytes, in pages of 64 tokens.
    assert value["kv_bytes_per_token"] == 256
    assert value["kv_bytes"] == 64 * 256
    num_cached = value["usage"]["total_tokens"] - 1  # the last token is never computed on
    assert value["kv_true_bits"] == pytest.approx(16 * 64 / num_cached)
    assert value["kv_full_page_bits"] == 16


def test_generate_counts_the_pages_of_an_adaptive_cache_by_rung(model):
    options = ("--kv-cache-dtype", "adaptive", "--kv-sink-tokens", "0", "--raw", "--ignore-eos")
    value = run_json("generate", "x" * 150, "--model", model, *options, "--max-tokens=2", "--json")
    assert value["kv_cache_dtype"] == "adaptive"
    assert value["kv_pages"] == {"v4": 3}
    # 2 layers x 2 KV heads: keys and values of 4 bits and a byte a row; 32 recent rows of BF16.
    page_bytes = 4 * 2 * 64 * (16 // 2 + 1)
    assert value["kv_bytes"] == 3 * page_bytes + 4 * 32 * 2 * 16 * 2
    assert value["kv_true_bits"] == pytest.approx(value["kv_bytes"] * 8 / (151 * 4 * 32))


def test_a_budget_of_bits_is_told_with_the_length_that_it_holds_at(model):
    adaptive = ("--kv-cache-dtype", "adaptive", "--kv-bits-budget", "12")
    command = ("generate", "hat", "--model", model, *adaptive, "--max-tokens", "2")
    facts = run(*command).stdout.splitlines()[-1]
    assert "; budget: 12 at 256 tokens)" in facts
    value = run_json(*command, "--json")
    assert (value["kv_bits_budget"], value["max_model_len"]) == (12, 256)
    assert "budget" not in run("generate", "hat", "--model", model, "--max-tokens", "2").stdout


def test_a_chat_model_is_asked_through_its_template_unless_raw(model, plain_model):
    options = ("--max-tokens", "1", "--json")
    chat = run_json("generate", "hat", "--model", model, *options)["prompt_token_ids"]
    raw = run_json("generate", "hat", "--model", model, "--raw", *options)["prompt_token_ids"]
    plain = run_json("generate", "hat", "--model", plain_model, *options)["prompt_token_ids"]
    assert raw == plain
    assert len(raw) == 3
    assert len(chat) > len(raw)
    assert " ".join(map(str, raw)) in " ".join(map(str, chat))


def test_generate_shows_the_text_and_one_line_of_facts(model):
    args = ("generate", "hat", "--model", model, "--max-tokens", "6", "--ignore-eos")
    value = run_json(*args, "--json")
    shown = run(*args, "--kv-cache-dtype", "bf16").stdout
    text, _, facts = shown.rstrip("\n").rpartition("\n\n")
    assert text == value["text"]
    assert facts.startswith("[6 tokens | first after ")
    assert "KV cache bf16: 16 KiB, " in facts
    assert "true bits (16.00 in full pages)" in facts


def test_the_same_question_gets_the_same_answer(model):
    args = ("generate", "a cat", "--model", model, "--max-tokens", "8", "--json")
    for options in ([], ["--temperature", "0.9", "--seed", "7"]):
        first, second = (run_json(*args, *options)["token_ids"] for _ in range(2))
        assert first == second
    other = run_json(*args, "--temperature", "5", "--seed", "8")["token_ids"]
    assert other != first


def test_generate_reads_the_prompt_from_a_pipe(model):
    args = ("--model", model, "--max-tokens", "1", "--json")
    piped = run("generate", *args, stdin="hat")
    assert json.loads(piped.stdout)["token_ids"] == run_json("generate", "hat", *args)["token_ids"]


def test_chat_keeps_the_conversation_and_its_cache(model, monkeypatch):
    from subten.engine.llm import LLM

    real, asked = LLM.chat_stream, []

    def recorded(llm: Any, messages: Any, params: Any) -> Any:
        asked.append([message["role"] for message in messages])
        return real(llm, messages, params)

    monkeypatch.setattr(LLM, "chat_stream", recorded)
    question = "the cat sat in a hat then ran far in the hat " * 2
    script = f"{question}\n\n{question}\n/reset\nhat\n/exit\nnever asked\n"
    shown = run("chat", "--model", model, "--max-tokens", "4", stdin=script).stdout
    facts = [line for line in shown.splitlines() if line.startswith("[")]
    assert asked == [["user"], ["user", "assistant", "user"], ["user"]]
    assert len(facts) == 3
    assert "were cached" not in facts[0]
    assert "prompt tokens were cached" in facts[1]
    assert "were cached" not in facts[2]
    assert "(a new conversation)" in shown
    assert "never asked" not in shown


def test_chat_goes_on_after_a_question_that_does_not_fit(model):
    script = f"{'hat ' * 300}\n/what\nhat\n"
    result = run("chat", "--model", model, "--max-tokens", "2", stdin=script)
    errors = result.stderr.splitlines()
    assert result.exit_code == 0
    assert len(errors) == 2
    assert "/reset begins a new conversation" in errors[0]
    assert "command: got '/what'; allowed: /reset, /exit" in errors[1]
    assert sum(line.startswith("[") for line in result.stdout.splitlines()) == 1


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(model, prompt):
    assert "prompt: got" in refusal("generate", prompt, "--model", model)
    assert "prompt: got" in refusal("generate", "--model", model, stdin=prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "0"], "max_tokens: got 0; allowed: an integer of at least 1"),
        (["--temperature", "nan"], "temperature: got nan; allowed: "),
        (["--top-p", "1.5"], "top_p: got 1.5; allowed: "),
        (["--seed", "-1"], "seed: got -1; allowed: "),
        (["--kv-cache-dtype", "int3"], "kv_cache_dtype: got 'int3'; allowed: fp32, bf16"),
        (["--kv-bits-budget", "3"], "kv_bits_budget: got 3.0; allowed: none, as kv_cache_dtype"),
        (
            ["--kv-cache-dtype", "adaptive", "--kv-bits-budget", "1"],
            "kv_bits_budget: got 1.0; allowed: at least",
        ),
        (["--device", "tpu"], "device: got 'tpu'; allowed: auto, cpu"),
        (["--backend", "cublas"], "backend: got 'cublas'; allowed: "),
        (["--dtype", "float16"], "dtype: got 'float16'; allowed: "),
        (["--max-model-len", "100000"], "max_model_len: got 100000; allowed: "),
        (["--max-model-len", "0"], "max_model_len: got 0; allowed: an integer of at least 1"),
        (
            ["--max-model-len", "2"],
            "allowed: 1 to 1 (prompt and output share 2 tokens, max_model_len)",
        ),
        (
            ["--kv-window-tokens", "-1"],
            "kv_window_tokens: got -1; allowed: an integer of at least 0",
        ),
        (["--kv-sink-tokens", "65"], "kv_sink_tokens: got 65; allowed: 0 to 64, one page"),
        (["--kv-bits-budget", "0"], "kv_bits_budget: got 0.0; allowed: a number of bits above 0"),
        (
            ["--kv-outlier-channels", "11"],
            "kv_outlier_channels: got 11.0; allowed: a number of percent from 0 to 10",
        ),
        (
            ["--kv-cache-dtype", "adaptive", "--kv-calibration", "no-file"],
            "allowed: a UTF-8 text file of some 256 tokens or more (No such file or directory)",
        ),
        (["--stop", ""], "stop: got ''; allowed: text that is not empty"),
    ],
)
def test_bad_values_are_refused_by_name(model, options, message):
    found = refusal("generate", "hat", "--model", model, *options)
    assert message in found
    assert "None" not in found


@pytest.mark.parametrize("options", [[], ["--raw"]], ids=["template", "raw"])
def test_an_over_long_prompt_is_refused_with_both_numbers(model, options):
    args = ("--model", model, *options)
    short = run_json("generate", "x", *args, "--max-tokens", "1", "--json")
    num_tokens = 256 + short["usage"]["prompt_tokens"]  # "x" is one token, and so is each more
    message = refusal("generate", "x" * 257, *args)
    assert message.startswith(f"prompt: got {num_tokens} tokens; allowed: 1 to 255 ")


def test_an_over_long_conversation_is_named_as_such(model):
    result = run("chat", "--model", model, stdin="x" * 257)
    assert result.stderr.startswith("subten: error: messages: got ")


def test_a_model_that_is_not_there_is_refused(tmp_path):
    for name in ("no-such-model", str(tmp_path / "none"), str(tmp_path / "none.gguf")):
        assert name in refusal("generate", "hat", "--model", name)
    (tmp_path / "empty").mkdir()
    assert "config.json" in refusal("generate", "hat", "--model", str(tmp_path / "empty"))
    for content, message in (
        (b"not a model at all", "text.gguf: no GGUF file, which would begin with GGUF"),
        (b"GGUF" + 40 * b"\xff", "text.gguf: damaged or truncated GGUF file"),
    ):
        (tmp_path / "text.gguf").write_bytes(content)
        assert refusal("generate", "hat", "--model", str(tmp_path / "text.gguf")) == message


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["generate", "hat", "--max-token", "3"], "--max-token"),
        (["generates"], "generates"),
        (["plan", "--batch-size", "x"], "--batch-size"),
        (["generate", "hat", "cat"], "cat"),
        (["eval", "kv"], "--text"),
        (["--nothing"], "--nothing"),
        (["train", "--nothing"], "--nothing"),
    ],
)
def test_unknown_options_and_words_are_refused_in_one_line(args, named):
    message = refusal(*args)
    assert named in message
    assert " --help`" in message


@pytest.mark.parametrize(
    ("command", "option", "value", "allowed"),
    [
        ("generate", "--max-tokens", "abc", "an integer"),
        ("generate", "--temperature", "x", "a number"),
        ("chat", "--max-model-len", "1.5", "an integer"),
        ("plan", "--context-len", "", "an integer"),
        ("bench latency", "--num-iters", "1\n2", "an integer"),
        ("train", "--rank", "two", "an integer"),
        ("train", "--max-seconds", "1m", "a number"),
    ],
)
def test_a_value_of_another_type_is_shown_with_what_is_allowed(command, option, value, allowed):
    message = refusal(*command.split(), option, value)
    asked = f"{option}: got {value!r}; allowed: {allowed}"
    assert message == f"{asked}, see `subten {command} --help`"


def test_no_command_shows_the_help():
    result = runner.invoke(app, [], prog_name="subten")
    assert "Commands:" in result.stdout + result.stderr


def test_train_refuses_in_the_same_words(tmp_path):
    out = "out: got none; allowed: the folder for everything that the run writes"
    assert refusal("train") == out
    message = refusal("train", "--config", str(tmp_path / "none.toml"))
    assert message.endswith("none.toml'; allowed: a TOML file (No such file or directory)")
    (tmp_path / "odd.toml").write_bytes(b"\xff")
    message = refusal("train", "--config", str(tmp_path / "odd.toml"))
    assert message.endswith("odd.toml'; allowed: a TOML file (byte 0 is not UTF-8)")
    (tmp_path / "kind.toml").write_text(f"out = '{tmp_path}'\nsteps = 'many'\n", encoding="utf-8")
    message = refusal("train", "--config", str(tmp_path / "kind.toml"))
    assert message == "steps: got 'many'; allowed: an integer"
    message = refusal("train", "--out", str(tmp_path))
    assert message == "gguf, checkpoint: got neither; allowed: one, the dense model"


def test_train_refuses_what_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    inside = str(tmp_path / "file" / "x")
    command = ("train", "--gguf", "none.gguf", "--text", "none.txt", "--steps", "1")
    message = refusal(*command, "--out", inside)
    assert message == f"out: got {inside!r}; allowed: a folder that can be made (Not a directory)"
    message = refusal(*command, "--out", str(tmp_path), "--json", inside)
    assert message == f"json: got {inside!r}; allowed: a writable file (File exists)"


def test_an_error_leaves_the_process_with_code_2_and_no_traceback(model):
    done = subprocess.run(
        [sys.executable, "-m", "subten", "generate", "", "--model", model],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("subten: error: prompt: got ''")
    assert done.stderr.count("\n") == 1


def test_info_lists_ops_and_codecs():
    found = run_json("info", "--json")
    backend = found["backends"]["attend"]
    assert DEVICE.startswith(found["device"])
    assert backend in ({"torch"} if DEVICE == "cpu" else {"triton", "cuda"})
    assert set(found["kv_cache_dtypes"]) == set(CODECS)
    assert found["kv_cache_dtypes"]["int4"]["true_bits"] == {"64": 4.5, "128": 4.25}
    told = run("info")
    assert told.exit_code == 0, told.stderr
    shown = " ".join(told.stdout.split())
    assert f"attend {backend}" in shown
    assert "4.250" in shown


def test_info_says_which_head_dimension_a_codec_refuses(monkeypatch):
    monkeypatch.setattr("subten.bench.machine.HEAD_DIMS", (6,))
    assert "refused" in run("info").stdout


def test_plan_of_a_shape_and_of_a_model(model):
    value = run_json("plan", "--shape", "mixtral-8x7b", "--kv-cache-dtype", "int4_g64", "--json")
    assert value["kv_bytes_per_token"] == 36864
    assert value["is_fitting"]
    shown = run("plan", "--shape", "mixtral-8x7b", "--batch-size", "64", "--context-len", "32768")
    assert "about 8 of 8 experts a layer" in shown.stdout
    assert "DOES NOT FIT" in shown.stdout
    own = run_json("plan", "--model", model, "--context-len", "64", "--json")
    assert own["kv_bytes_per_token"] == 256
    assert own["context_len"] == 64
    assert "model, shape: got both;" in refusal("plan", "--model", model, "--shape", "x")
    assert "model, shape: got neither;" in refusal("plan")
    adaptive = ("plan", "--shape", "mixtral-8x7b", "--kv-cache-dtype", "adaptive")
    assert run_json(*adaptive, "--kv-bits-budget", "3.3", "--json")["kv_true_bits"] == 3.3
    assert "kv_bits_budget: got none; allowed: a number of bits" in refusal(*adaptive)
    for bad in (["--kv-bits-budget", "nan"], ["--kv-bits-budget", "17"]):
        assert "kv_bits_budget: got" in refusal(*adaptive, *bad)
    assert "kv_bits_budget: got 3.0" in refusal("plan", "--model", model, "--kv-bits-budget", "3")


def test_plan_stays_within_the_context_of_the_model(model):
    own = ("plan", "--model", model)
    for command, default in ((own, 256), (("plan", "--shape", "llama-3-70b"), 8192)):
        assert run_json(*command, "--json")["context_len"] == default
    assert run_json(*own, "--context-len", "256", "--json")["context_len"] == 256
    message = refusal(*own, "--context-len", "257")
    assert message == "context_len: got 257; allowed: 1 to 256, the model's own context"


@pytest.mark.parametrize(
    ("shape", "published", "asked"),
    [("llama-3-70b", 8192, 32768), ("qwen3-30b-a3b", 40960, 131072)],
)
def test_plan_of_a_shape_may_be_longer_and_says_so(shape, published, asked):
    note = f"The published model's own context is {published}"
    for context, is_longer in ((published, False), (asked, True)):
        command = ("plan", "--shape", shape, "--context-len", str(context))
        value = run_json(*command, "--json")
        assert (value["context_len"], value["max_model_len"]) == (context, published)
        assert value["kv_bytes_per_context"] == context * value["kv_bytes_per_token"]
        lines = run(*command).stdout.splitlines()
        assert sum(line.startswith(note) for line in lines) == is_longer


def test_plan_says_whose_memory_and_bandwidth_it_reckons_with(monkeypatch):
    command = ("plan", "--shape", "mixtral-8x7b")
    shown = run(*command, "--memory", "80", "--bandwidth", "3.35").stdout
    assert "usable of 74.5 GiB (as given)" in shown
    assert "floor at 3.35 TB/s (as given): " in shown
    cpu = detect("cpu")
    gpu = replace(cpu, kind="cuda", name="NVIDIA L4", memory_bytes=24 * 2**30)
    for found, memory in (
        (cpu, "usable of 131 GiB (an H200's; --memory)"),
        (gpu, "usable of 24 GiB (this NVIDIA L4's; --memory)"),
    ):
        monkeypatch.setattr("subten.device.detect", lambda found=found: found)
        shown = run(*command).stdout
        assert memory in shown
        assert "floor at 4.56 TB/s (an H200's; --bandwidth): " in shown


@pytest.mark.parametrize("option", ["memory", "bandwidth"])
@pytest.mark.parametrize("value", ["-1.0", "0.0", "nan", "inf"])
def test_plan_names_the_option_that_it_refuses(option, value):
    message = refusal("plan", "--shape", "mixtral-8x7b", f"--{option}", value)
    assert message == f"{option}: got {value}; allowed: a finite number above 0"


def test_eval_kv_prints_a_table_and_writes_json(model, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "deep" / "out.json"
    text.write_text("the cat sat in a hat " * 20, encoding="utf-8")
    options = ("--kv-cache-dtype", "fp8,int4", "--window", "50", "--max-tokens", "120")
    result = run("eval", "kv", "--model", model, "--text", str(text), *options, "--json", str(out))
    assert result.exit_code == 0, result.stderr
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["kind"] == "kv_quality"
    assert written["num_tokens"] == 120
    assert [row["kv_cache_dtype"] for row in written["results"]] == ["fp8", "int4"]
    assert all(row["kld_mean"] > 0 for row in written["results"])
    assert written["environment"]["torch"]
    assert "int4" in result.stdout
    assert "KLD 99.9 %" in result.stdout


def test_eval_kv_of_schemes_adds_records(model, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("the cat sat in a hat " * 100, encoding="utf-8")
    command = ("eval", "kv", "--model", model, "--text", str(text), "--dtype", "float32")

    def records(*options: str) -> list[dict[str, Any]]:
        result = run(*command, *options, "--json", str(out))
        assert result.exit_code == 0, result.stderr
        return json.loads(out.read_text(encoding="utf-8"))

    fields = {"model", "text", "window", "scheme", "ours", "true_bits", "ppl", "ppl_reference"}
    fields |= {"kld_mean", "kld_p999", "top1_agreement", "date", "commit", "command", "num_tokens"}
    window = ("--window", "100", "--max-windows", "2")
    found = records("--scheme", "kivi-2,adaptive-12", *window)
    assert [(row["scheme"], row["ours"]) for row in found] == [
        ("kivi-2", False),
        ("adaptive-12", True),
    ]
    assert all(fields <= set(row) and row["num_tokens"] == 198 for row in found)
    assert all(row["kind"] == "kv_scheme_quality" for row in found)
    again = records("--scheme", "kivi-2", *window)
    assert [row["scheme"] for row in again] == ["kivi-2", "adaptive-12"]
    found = records("--scheme", "bf16,int4", "--task", "generation", "--window", "8", "--num", "40")
    exact = next(r for r in found if r["kind"] == "kv_generation" and r["scheme"] == "bf16")
    assert exact["num_tokens"] == exact["same_as_reference"] == 40
    assert exact["ppl"] >= 1.0
    assert exact["text"] == text.name and exact["answer"]
    assert len(found) == 4
    for options, message in (
        (("--task", "needles"), "scheme: got none; allowed: "),
        (("--scheme", "int4", "--task", "other"), "task: got 'other'"),
        (("--scheme", "int4", "--kv-cache-dtype", "int4"), "scheme: got 'int4'"),
        (("--scheme", "int4", "--window", "20,30"), "window: got '20,30'"),
        (("--scheme", "adaptive-2", "--window", "100"), "kv_bits_budget: got 2.0"),
        (("--scheme", "int4", "--num", "0"), "num: got 0"),
    ):
        assert refusal(*command, *options).startswith(message)


def test_weights_are_packed_where_it_is_asked_for(model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat in a hat " * 5, encoding="utf-8")
    generate = ("generate", "hat", "--model", model, "--max-tokens", "2", "--json")
    plain, packed = (run_json(*generate, "--quantization", name) for name in ("none", "fp8"))
    assert (plain["quantization"], packed["quantization"]) == ("none", "fp8")
    assert packed["weight_bytes"] < plain["weight_bytes"]
    measure = ("eval", "kv", "--model", model, "--text", str(text), "--kv-cache-dtype", "bf16")
    measure = (*measure, "--window", "40", "--json", "-", "--quantization")
    plain, packed = (run_json(*measure, name) for name in ("none", "fp8"))
    assert plain["results"][0]["kld_mean"] == 0 < packed["results"][0]["kld_mean"]
    assert packed["weight_bytes"] < packed["reference_weight_bytes"] == plain["weight_bytes"]
    message = refusal(*generate, "--quantization", "int4")
    assert message.startswith("quantization: got int4 for qkv of 32 inputs; allowed: none, fp8, or")
    message = refusal(*generate, "--quantization", "int5")
    assert message == "quantization: got 'int5'; allowed: none, fp8, int4"


def test_eval_kv_refuses_text_that_is_not_there_or_not_text(model, tmp_path):
    result = run("eval", "kv", "--model", model, "--text", str(tmp_path / "none.txt"))
    assert result.exit_code == 2
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    message = refusal("eval", "kv", "--model", model, "--text", str(binary))
    assert message == f"text: got {str(binary)!r}; allowed: UTF-8 text (byte 0 is not UTF-8)"


def test_bench_latency_counts_its_samples(model, tmp_path):
    out = tmp_path / "latency.json"
    options = ("--prompt-len", "9", "--output-len", "3", "--batch-size", "2", "--num-iters", "2")
    result = run("bench", "latency", "--model", model, *options, "--json", str(out))
    assert result.exit_code == 0, result.stderr
    written = json.loads(out.read_text(encoding="utf-8"))
    assert [row["kv_cache_dtype"] for row in written["results"]] == ["bf16", "int4"]
    for row in written["results"]:
        assert row["ttft_ms"]["num_samples"] == row["tpot_ms"]["num_samples"] == 4
        assert row["itl_ms"]["num_samples"] == 8
        assert 0 < row["tpot_ms"]["p50"] <= row["tpot_ms"]["p99"]
        assert row["peak_memory_bytes"] > 10**7
    assert "TPOT p50" in result.stdout
    piped = run_json("bench", "latency", "--model", model, *options, "--json", "-")
    assert piped["kind"] == "latency"


@pytest.mark.parametrize(
    ("command", "is_list"),
    [
        (["bench", "latency", "--model", "no-such-model"], False),
        (["bench", "latency", "--shape", "tiny-qwen3"], True),
        (["bench", "kernels", "--shape", "tiny-qwen3"], True),
        (["bench", "serve", "--model", "m", "--base-url", "http://127.0.0.1:9"], False),
        (["eval", "kv", "--model", "no-such-model", "--text", __file__], False),
        (["eval", "kv", "--model", "no-such-model", "--text", __file__, "--scheme", "bf16"], True),
        (["eval", "keys"], True),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_a_json_file_of_no_use_is_refused_before_anything_is_measured(
    command, is_list, tmp_path, monkeypatch
):
    def measured(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("measured, and the result is lost")

    monkeypatch.setattr("subten.engine.roof.measure_roof", measured)
    monkeypatch.setattr("subten.bench.kv_synthetic.measure_keys", measured)
    monkeypatch.setattr("subten.bench.serving.measure_serving", measured)
    other = tmp_path / "other.json"
    other.write_text("{}", encoding="utf-8")
    whys = {tmp_path: "Is a directory", other / "out.json": "exists"}
    for path, why in whys.items():
        message = refuse_placed(*command, "--json", str(path))
        assert message.startswith(f"json: got {str(path)!r}; allowed: a writable file (")
        assert why in message or "Not a directory" in message
    if is_list:
        message = refuse_placed(*command, "--json", str(other))
        assert message == (
            f"json: got {str(other)!r}; allowed: a file to make, or one that holds a JSON list of "
            "records"
        )
    assert other.read_text(encoding="utf-8") == "{}"
    assert list(tmp_path.iterdir()) == [other]


def refuse_placed(*args: str) -> str:
    """`refusal` of a command that may have no device."""
    if args[1] in ("serve", "keys"):
        result = runner.invoke(app, [*args], prog_name="subten")
        assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
        return result.stderr.removeprefix("subten: error: ").removesuffix("\n")
    return refusal(*args)


def test_what_was_measured_is_shown_although_it_cannot_be_kept(tmp_path, monkeypatch):
    def full(*_args: Any) -> None:
        raise ConfigError("json: no space left")

    monkeypatch.setattr("subten.bench.records.write_json", full)
    options = ("--shape", "tiny-qwen3", "--context-len", "70", "--json", str(tmp_path / "out.json"))
    short = ("--prompt-len", "9", "--num-steps", "3")
    for command, shown in (("latency", "TPOT"), ("kernels", "a step")):
        more = short if command == "latency" else ("--num-replays", "1")
        result = run("bench", command, *options, *more)
        assert result.exit_code == 2
        assert result.stderr.endswith("json: no space left\n")
        assert "Making bf16 weights ..." in result.stderr
        assert shown in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output-len", "1"], "output_len: got 1; allowed: an integer of at least 2"),
        (["--num-iters", "0"], "num_iters: got 0"),
        (
            ["--prompt-len", "250", "--output-len", "7"],
            "prompt_len, output_len: got '250 + 7 tokens'; allowed: together at most max_model_len",
        ),
        (["--batch-size", "65"], "batch_size: got 65; allowed: 1 to 64"),
        (["--kv-cache-dtype", "bf16,"], "kv_cache_dtype: got ''"),
        (["--kv-cache-dtype", "int4,int4"], "kv_cache_dtype: got 'int4,int4'; allowed: each"),
    ],
)
def test_bench_latency_refuses_what_it_cannot_measure(model, options, message):
    assert message in refusal("bench", "latency", "--model", model, *options)


def test_the_demo_names_resolve_to_the_demo_models(monkeypatch, tmp_path, model):
    def build(folder: Path, progress: Any) -> Path:
        assert folder == tmp_path
        progress("building the MoE", 0.5)
        return Path(model)

    monkeypatch.setattr("subten.weights.upcycled.demo_model", build)
    monkeypatch.setattr("subten.weights.upcycled.find_demo_gguf", lambda: Path(model))
    monkeypatch.setenv("SUBTEN_CACHE_DIR", str(tmp_path))
    result = run("generate", "hat", "--max-tokens", "1", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["model"] == "demo"
    assert "Building the demo model, once" in result.stderr
    dense = run_json("generate", "hat", "--model", "demo-dense", "--max-tokens", "1", "--json")
    assert dense["model"] == "demo-dense"


def test_a_home_that_cannot_hold_the_demo_is_one_line(monkeypatch, tmp_path):
    def build(*_args: Any) -> Path:
        raise PermissionError(13, "Permission denied", str(tmp_path / "subten"))

    monkeypatch.setattr("subten.weights.upcycled.find_demo_gguf", Path)
    monkeypatch.setattr("subten.weights.upcycled.build_moe", build)
    monkeypatch.delenv("SUBTEN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    message = refusal("generate", "hat")
    assert f"kept in {tmp_path / 'subten'}: Permission denied; allowed: a folder" in message
    assert "SUBTEN_CACHE_DIR" in message


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch):
    def nobody(_uid: int) -> Any:
        raise KeyError

    for name in ("SUBTEN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert "SUBTEN_CACHE_DIR: not set" in refusal("generate", "hat")


def test_a_request_that_fails_ends_with_code_1_and_its_reason(model, monkeypatch):
    from subten.engine.completion import Chunk

    real = cli._write

    def broken(chunks: Any, *, is_quiet: bool) -> Any:
        import dataclasses

        from subten.core import FinishReason

        last = list(chunks)[-1]
        failed = dataclasses.replace(
            last.completion, finish_reason=FinishReason.ERROR, finish_detail="logits are NaN"
        )
        return real(iter([Chunk(text="", token_id=None, completion=failed)]), is_quiet=is_quiet)

    monkeypatch.setattr(cli, "_write", broken)
    result = run("generate", "hat", "--model", model, "--max-tokens", "1")
    assert result.exit_code == 1
    assert result.stderr == "subten: error: the request failed: logits are NaN\n"


def test_codec_lists_are_split_at_commas():
    assert cli_bench.codec_list("bf16, int4") == ["bf16", "int4"]
