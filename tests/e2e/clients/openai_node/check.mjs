// The `openai` package for Node, unmodified. Usage: node check.mjs URL MODEL [KEY]
// One line of JSON per check on standard output; exit code 1 if one of them failed.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model = "tiny", apiKey = "none"] = process.argv.slice(2);
if (!url) {
  console.error("usage: node check.mjs URL MODEL [KEY]");
  process.exit(2);
}
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "say hello" }];
const unicode = "naïve 🤖👩‍🚀 日本語";
let failures = 0;

async function check(name, work) {
  try {
    await work();
    console.log(JSON.stringify({ name, ok: true }));
  } catch (error) {
    failures += 1;
    console.log(JSON.stringify({ name, ok: false, error: String(error?.stack ?? error) }));
  }
}

async function metric(name) {
  const answer = await fetch(`${url}/metrics`, { headers: { Authorization: `Bearer ${apiKey}` } });
  const lines = (await answer.text()).split("\n").filter((line) => line.startsWith(`${name}{`));
  assert.ok(lines.length > 0, `/metrics has no ${name}`);
  return lines.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

await check("models are listed", async () => {
  const names = [];
  for await (const each of client.models.list()) names.push(each.id);
  assert.ok(names.includes(model));
});

await check("usage of a completion adds up", async () => {
  const answer = await client.completions.create({
    model, prompt: "the quick brown", max_tokens: 5, ignore_eos: true,
  });
  assert.equal(answer.usage.completion_tokens, 5);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 5);
  assert.equal(answer.choices[0].finish_reason, "length");
});

await check("a streamed chat is the whole chat, usage last", async () => {
  const asked = { model, messages, max_tokens: 12, temperature: 0 };
  const whole = await client.chat.completions.create(asked);
  const stream = await client.chat.completions.create({
    ...asked, stream: true, stream_options: { include_usage: true },
  });
  let text = "";
  const reasons = [];
  let last;
  for await (const event of stream) {
    text += event.choices[0]?.delta?.content ?? "";
    if (event.choices[0]?.finish_reason) reasons.push(event.choices[0].finish_reason);
    last = event;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(reasons, [whole.choices[0].finish_reason]);
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
});

await check("the helper assembles a stream with logprobs", async () => {
  const runner = client.chat.completions.stream({
    model, messages, max_tokens: 6, temperature: 0, logprobs: true, top_logprobs: 2,
  });
  const final = await runner.finalChatCompletion();
  assert.ok(final.choices[0].logprobs.content.length > 0);
  assert.equal(final.choices[0].logprobs.content[0].top_logprobs.length, 2);
});

await check("characters of many tokens are streamed whole", async () => {
  const stream = await client.completions.create({
    model, prompt: "a", max_tokens: 300, stream: true, guided_choice: [unicode],
  });
  let text = "";
  for await (const event of stream) {
    assert.ok(!event.choices[0].text.includes("\ufffd"));
    text += event.choices[0].text;
  }
  assert.equal(text, unicode);
});

await check("an abort frees the slot", async () => {
  const before = await metric("serving_twin_engine_aborted_total");
  const controller = new AbortController();
  const stream = await client.chat.completions.create(
    { model, messages, max_tokens: 900, stream: true, ignore_eos: true },
    { signal: controller.signal },
  );
  let chunks = 0;
  for await (const _ of stream) {
    chunks += 1;
    if (chunks === 2) controller.abort();
  }
  assert.ok(chunks >= 2);
  for (let tries = 0; tries < 200; tries += 1) {
    const aborted = (await metric("serving_twin_engine_aborted_total")) - before;
    if (aborted >= 1 && (await metric("vllm:num_requests_running")) === 0) return;
    await new Promise((done) => setTimeout(done, 100));
  }
  assert.fail("the aborted request still runs");
});

await check("errors have their classes", async () => {
  const asked = { model, prompt: "a", max_tokens: 1 };
  await assert.rejects(
    client.completions.create({ ...asked, model: "nope" }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
  );
  await assert.rejects(
    client.completions.create({ ...asked, temperature: -1 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
  );
  await assert.rejects(
    client.completions.create({ ...asked, prompt: Array(100_000).fill(5) }),
    (error) => error instanceof OpenAI.BadRequestError && /tokens/.test(error.message),
  );
});

await check("sixteen at a time are answered", async () => {
  const answers = await Promise.all(
    Array.from({ length: 16 }, (_, number) =>
      client.completions.create({ model, prompt: `p${number}`, max_tokens: 4, temperature: 0 }),
    ),
  );
  assert.equal(new Set(answers.map((answer) => answer.id)).size, 16);
});

await check("a JSON schema is kept", async () => {
  const answer = await client.chat.completions.parse({
    model, messages, max_tokens: 800, seed: 1,
    response_format: {
      type: "json_schema",
      json_schema: {
        name: "weather", strict: true,
        schema: {
          type: "object",
          properties: { sky: { enum: ["clear", "cloudy"] }, wind: { enum: [1, 2, 3] } },
          required: ["sky", "wind"], additionalProperties: false,
        },
      },
    },
  });
  const parsed = JSON.parse(answer.choices[0].message.content);
  assert.ok(["clear", "cloudy"].includes(parsed.sky) && [1, 2, 3].includes(parsed.wind));
});

process.exit(failures ? 1 : 0);
