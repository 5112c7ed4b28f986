// The AI SDK's provider for OpenAI-compatible servers. Usage: node check.mjs URL MODEL [KEY]
// Its zod schemas are strict: an answer out of form is an error. Exit code 1 if a check failed.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText } from "ai";

const [url, model = "tiny", apiKey = "none"] = process.argv.slice(2);
if (!url) {
  console.error("usage: node check.mjs URL MODEL [KEY]");
  process.exit(2);
}
const provider = createOpenAICompatible({
  name: "serving-twin", baseURL: `${url}/v1`, apiKey, includeUsage: true,
  supportsStructuredOutputs: true,
});
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

for (const [kind, named] of [
  ["chat", provider(model)],
  ["completion", provider.completionModel(model)],
]) {
  const asked = {
    model: named, prompt: "say hello", maxOutputTokens: 12, temperature: 0, maxRetries: 0,
  };
  await check(`${kind}: a stream is the whole answer, with usage and a reason`, async () => {
    const whole = await generateText(asked);
    const stream = streamText(asked);
    let text = "";
    for await (const part of stream.textStream) text += part;
    assert.equal(text, whole.text);
    assert.ok(["stop", "length"].includes(whole.finishReason), whole.finishReason);
    assert.equal(await stream.finishReason, whole.finishReason);
    const usage = await stream.usage;
    assert.equal(usage.outputTokens, whole.usage.outputTokens);
    assert.equal(usage.inputTokens, whole.usage.inputTokens);
    assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
  });
}

await check("an object fits its schema", async () => {
  const { object } = await generateObject({
    model: provider(model), prompt: "the weather?", maxOutputTokens: 800, maxRetries: 0,
    schema: jsonSchema({
      type: "object",
      properties: { sky: { enum: ["clear", "cloudy"] }, wind: { enum: [1, 2, 3] } },
      required: ["sky", "wind"], additionalProperties: false,
    }),
  });
  assert.ok(["clear", "cloudy"].includes(object.sky) && [1, 2, 3].includes(object.wind));
});

await check("an abort ends the stream", async () => {
  const controller = new AbortController();
  const stream = streamText({
    model: provider(model), prompt: "a", maxOutputTokens: 900, maxRetries: 0,
    abortSignal: controller.signal, onError: () => {},
    providerOptions: { "serving-twin": { ignore_eos: true } },
  });
  let chunks = 0;
  for await (const part of stream.fullStream) {
    if (part.type === "text-delta" && (chunks += 1) === 2) controller.abort();
  }
  assert.ok(chunks >= 2);
});

await check("an unknown model is a 404, a bad number a 400", async () => {
  for (const [asked, status] of [
    [{ model: provider("nope") }, 404],
    [{ model: provider(model), topP: 7 }, 400],
  ]) {
    await assert.rejects(
      generateText({ prompt: "a", maxRetries: 0, ...asked }),
      (error) => error.statusCode === status && error.message.length > 10,
    );
  }
});

process.exit(failures ? 1 : 0);
