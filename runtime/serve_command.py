"""``runtime serve``: a model behind OpenAI's API, under the policies of the twin."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from runtime.engine.settings import EngineSettings
    from runtime.server.http_server import Opened
    from runtime.text.tokenizer import TextTokenizer

MEMORY = "Memory and speed"
POLICY = "Policies"
INSTANCES = "Several engines"
KEYS = "Keys"
FRONT = "Front end"
DEFAULT_PORT = 8000
SHOWN_TOKENS = 5
LOG_LEVELS = ("debug", "info", "warning", "error")


def serve(
    model: Annotated[
        Path | None,
        typer.Argument(help="Folder of a checkpoint, plain or quantized; none: the demo model."),
    ] = None,
    scenario: Annotated[
        Path | None,
        typer.Option("--scenario", help="Scenario file: model, memory, precision, limits."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change the scenario; repeatable."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="0: any free one.")
    ] = DEFAULT_PORT,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            "--name",
            metavar="NAME",
            help="Name the model answers to; repeatable.",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option("--dtype", help="auto, float32 or bfloat16.", rich_help_panel=MEMORY),
    ] = "auto",
    device: Annotated[
        str,
        typer.Option("--device", help="cpu or cuda:N; see docs/serve.md.", rich_help_panel=MEMORY),
    ] = "cpu",
    threads: Annotated[
        int,
        typer.Option(
            "--threads",
            metavar="N",
            min=0,
            help="CPU threads; 0: all cores.",
            rich_help_panel=MEMORY,
        ),
    ] = 0,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="Arena for quantized experts and KV, such as 4GiB; none: by the machine.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            "--max-model-len",
            metavar="N",
            min=2,
            help="Most tokens of prompt and answer; none: the model's.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(
            "--max-running",
            "--max-num-seqs",
            metavar="N",
            min=1,
            help="Most sequences at a time (64).",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    prefill_tokens: Annotated[
        int | None,
        typer.Option(
            "--prefill-tokens",
            metavar="N",
            min=1,
            help="Most prompt tokens in a step (512).",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            help="Planner of expert widths (hull, greedy, uniform, uniform_remainder), or one "
            "width such as 4; for quantized checkpoints.",
            rich_help_panel=POLICY,
        ),
    ] = None,
    preemption: Annotated[
        str,
        typer.Option(
            "--preemption",
            help="recompute, or swap: blocks are saved in the prefix store first.",
            rich_help_panel=POLICY,
        ),
    ] = "recompute",
    prefix_store: Annotated[
        str,
        typer.Option(
            "--prefix-store",
            help="memory, none, a folder, or the socket of runtime store serve.",
            rich_help_panel=POLICY,
        ),
    ] = "memory",
    prefix_memory: Annotated[
        str,
        typer.Option("--prefix-memory", help="Memory for prefixes.", rich_help_panel=POLICY),
    ] = "512MiB",
    prefix_ssd: Annotated[
        str,
        typer.Option("--prefix-ssd", help="Room on the folder's disk.", rich_help_panel=POLICY),
    ] = "0",
    decisions: Annotated[
        Path | None,
        typer.Option(
            "--decisions",
            help="File for the log of policy calls (.jsonl.gz), for twin replay.",
            rich_help_panel=POLICY,
        ),
    ] = None,
    decision_calls: Annotated[
        int,
        typer.Option(
            "--decision-calls",
            metavar="N",
            min=1,
            help="Calls kept at most.",
            rich_help_panel=POLICY,
        ),
    ] = 200_000,
    instances: Annotated[
        int,
        typer.Option(
            "--instances", metavar="N", help="Engines behind the API.", rich_help_panel=INSTANCES
        ),
    ] = 1,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help="process: on this machine; ray: deployments of Ray Serve.",
            rich_help_panel=INSTANCES,
        ),
    ] = "process",
    routing: Annotated[
        str | None,
        typer.Option(
            "--routing",
            help="Rule by which a request gets its engine: prefix_aware (default), sticky, "
            "round_robin, random.",
            rich_help_panel=INSTANCES,
        ),
    ] = None,
    ray_address: Annotated[
        str,
        typer.Option(
            "--ray-address",
            help="host:port of a cluster or auto; none: Ray is started here, on loopback.",
            rich_help_panel=INSTANCES,
        ),
    ] = "",
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="SERVING_TWIN_API_KEY",
            help="Repeatable.",
            rich_help_panel=KEYS,
        ),
    ] = None,
    admin_key: Annotated[
        str,
        typer.Option(
            "--admin-key",
            metavar="KEY",
            envvar="SERVING_TWIN_ADMIN_KEY",
            help="Opens /admin.",
            rich_help_panel=KEYS,
        ),
    ] = "",
    metrics_open: Annotated[
        bool,
        typer.Option(
            "--metrics-open/--metrics-with-key",
            help="Whether /metrics answers without an API key.",
            rich_help_panel=KEYS,
        ),
    ] = False,
    max_queued_requests: Annotated[
        int, typer.Option("--max-queued-requests", metavar="N", min=1, rich_help_panel=FRONT)
    ] = 1024,
    max_queued_tokens: Annotated[
        int, typer.Option("--max-queued-tokens", metavar="N", min=1, rich_help_panel=FRONT)
    ] = 1 << 20,
    request_timeout: Annotated[
        float,
        typer.Option(
            "--request-timeout",
            metavar="SECONDS",
            help="Seconds for an answer.",
            rich_help_panel=FRONT,
        ),
    ] = 600.0,
    drain_timeout: Annotated[
        float,
        typer.Option(
            "--drain-timeout",
            metavar="SECONDS",
            help="Seconds that running requests may go on after SIGTERM.",
            rich_help_panel=FRONT,
        ),
    ] = 30.0,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin", metavar="ORIGIN", help="Repeatable; * for all.", rich_help_panel=FRONT
        ),
    ] = None,
    root_path: Annotated[
        str, typer.Option("--root-path", help="Such as /llm.", rich_help_panel=FRONT)
    ] = "",
    chat_template: Annotated[
        Path | None,
        typer.Option(
            "--chat-template", help="Jinja file instead of the model's.", rich_help_panel=FRONT
        ),
    ] = None,
    tls_cert: Annotated[
        str, typer.Option("--tls-cert", help="PEM file.", rich_help_panel=FRONT)
    ] = "",
    tls_key: Annotated[
        str, typer.Option("--tls-key", help="PEM file.", rich_help_panel=FRONT)
    ] = "",
    log_level: Annotated[
        str,
        typer.Option("--log-level", help="debug, info, warning or error.", rich_help_panel=FRONT),
    ] = "info",
    log_prompts: Annotated[
        bool,
        typer.Option(
            "--log-prompts", help="Prompts and answers go into the log.", rich_help_panel=FRONT
        ),
    ] = False,
    otlp: Annotated[
        str,
        typer.Option("--otlp-endpoint", help="Where spans go.", rich_help_panel=FRONT),
    ] = "",
) -> None:
    """Serve a model behind OpenAI's API.

    Memory is one arena that KV blocks and expert weights share; batching, bits per expert weight
    and the prefix cache are decided by the policies that the twin simulates.
    """
    import msgspec

    from runtime.decision_files import reserved
    from runtime.serve_settings import ServeOptions, engine_settings
    from runtime.server.engine_client import EngineGoneError
    from runtime.server.http_server import Address, Opened, run_server
    from runtime.server.instances_open import open_instances
    from runtime.server.instances_settings import decision_files, instance_settings
    from runtime.server.logs import log_as_json
    from runtime.server.process_engine import ProcessEngine
    from runtime.server.settings import ServerSettings
    from runtime.text.chat_template import ChatTemplate
    from runtime.text.tokenizer import TextTokenizer

    if log_level not in LOG_LEVELS:
        raise typer.BadParameter(
            f"--log-level: must be {', '.join(LOG_LEVELS)}, found {log_level!r}"
        )
    if log_level != "info" or not sys.stderr.isatty():
        log_as_json(log_level)
    else:
        log_as_json("warning")  # a person is watching: only what asks for attention
    options = ServeOptions(
        model=model,
        scenario=scenario,
        overrides=tuple(overrides or ()),
        dtype=dtype,
        device=device,
        threads=threads,
        memory=memory,
        context=context,
        max_running=max_running,
        prefill_tokens=prefill_tokens,
        precision=precision,
        preemption=preemption,
        prefix_store=prefix_store,
        prefix_memory=prefix_memory,
        prefix_ssd=prefix_ssd,
        decisions=decisions,
        decision_calls=0 if decisions is None else decision_calls,  # no file would hold them
    )
    several = instance_settings(instances, engine, routing, ray_address)
    settings: EngineSettings = engine_settings(options, say=_say)
    folder = Path(settings.model)
    names = tuple(name or ()) or (folder.name,)
    front = ServerSettings(
        model_names=names,
        api_keys=tuple(api_key or ()),
        admin_key=admin_key,
        metrics_open=metrics_open,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        request_timeout_s=request_timeout,
        drain_timeout_s=drain_timeout,
        cors_origins=tuple(cors or ()),
        root_path=root_path,
        log_prompts=log_prompts,
        otlp_endpoint=otlp,
    )
    text = TextTokenizer.open(folder)
    template = None
    if text is not None:
        template = ChatTemplate.open(folder, text.named_tokens, file=chat_template)
    began = time.perf_counter()
    found: dict[str, Any] = {"port": port}

    async def open_engine() -> Opened:
        if several.is_plain:
            one = await ProcessEngine.start(settings)
            found["info"] = msgspec.to_builtins(one.info)
            return Opened(engine=one, text=text, template=template)
        all_ = await open_instances(settings, several)
        found["info"] = msgspec.to_builtins(all_.info)
        return Opened(engine=all_, text=text, template=template, instances=all_.instances)

    scheme = "https" if tls_cert else "http"

    def listening(bound_port: int) -> None:
        found["port"] = bound_port
        _say(f"listening on {scheme}://{host}:{bound_port}, loading {folder}")

    def ready() -> None:
        _say(
            _greeting(
                f"{scheme}://{host}:{found['port']}{root_path}",
                names[0],
                found["info"],
                time.perf_counter() - began,
                has_chat=template is not None,
                has_text=text is not None,
                needs_key=bool(api_key),
            )
        )
        if text is not None and (warning := _unknown_tokens(text, found["info"]["vocabulary"])):
            _say(warning)

    try:
        with reserved(decision_files(settings.decision_log, several)):
            run_server(
                front,
                open_engine,
                Address(host=host, port=port, certificate=tls_cert, key=tls_key),
                on_listening=listening,
                on_ready=ready,
            )
    except EngineGoneError as error:
        _say(f"error: {error}")
        raise typer.Exit(1) from None


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _unknown_tokens(text: TextTokenizer, vocabulary: int) -> str:
    """A warning of tokens that the tokenizer has and the model lacks; empty: there are none."""
    tokens = text.tokens_from(vocabulary)
    if not tokens:
        return ""
    shown = ", ".join(f"{name!r:.60} ({token})" for token, name in [*tokens.items()][:SHOWN_TOKENS])
    more = f" and {len(tokens) - SHOWN_TOKENS:,} more" if len(tokens) > SHOWN_TOKENS else ""
    return (
        f"warning: {text.folder}: the tokenizer has tokens outside the model's vocabulary "
        f"0..{vocabulary - 1}: {shown}{more}; texts with them are refused"
    )


def _greeting(
    url: str,
    name: str,
    info: dict[str, Any],
    seconds: float,
    *,
    has_chat: bool,
    has_text: bool,
    needs_key: bool,
) -> str:
    """What is served, and one line that calls it."""
    memory = info["page_bytes"] * info["arena_pages"]
    if has_chat:
        route = "chat/completions"
        asks = '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
    else:
        route = "completions"
        asks = '"prompt": "The capital of France is"' if has_text else '"prompt": [1, 2, 3]'
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return (
        f"serving {name} ({info['model_type']}, {info['dtype']}, {info['experts']} experts) on "
        f"{info['device']} after {seconds:.1f} s: {info['context_tokens']:,} tokens of context, "
        f"arena of {memory / 2**20:,.0f} MiB\n"
        f"{url}/v1, metrics at {url}/metrics; call it so:\n"
        f"  curl {url}/v1/{route} -H 'Content-Type: application/json'{key} \\\n"
        f'    -d \'{{"model": "{name}", {asks}, "max_tokens": 32, '
        f'"temperature": 0}}\''
    )
