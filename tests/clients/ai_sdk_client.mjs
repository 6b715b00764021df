// Vercel's AI SDK with its provider for OpenAI-compatible servers: text, objects, tools in several steps, images.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { assert, key, model as name, png, run, url } from "./checks.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = createOpenAICompatible({
  name: "saccade", baseURL: url, apiKey: key, includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider(name);
const Sum = z.object({ a: z.union([z.literal(1), z.literal(2)]), b: z.union([z.literal(3), z.literal(4)]) });
const given = { model, maxRetries: 0, providerOptions: { saccade: { parallel_tool_calls: false } } };

function tools() {
  const calls = [];
  const add = tool({
    description: "Adds two numbers.", inputSchema: Sum,
    execute: async (input) => (calls.push(input), input.a + input.b),
  });
  return { calls, tools: { add } };
}

await run({
  "a stream is the whole answer": async () => {
    const fields = { ...given, system: "be brief", prompt: "hello", temperature: 0, maxOutputTokens: 12 };
    const whole = await generateText(fields);
    const stream = streamText(fields);
    assert((await stream.text) === whole.text, "they differ");
    assert((await stream.usage).outputTokens > 0, "no usage");
  },
  "an image": async () => {
    const content = [{ type: "text", text: "what is it" }, { type: "image", image: png }];
    await generateText({ ...given, messages: [{ role: "user", content }], maxOutputTokens: 4 });
  },
  "an object of a schema": async () => {
    const { object } = await generateObject({ ...given, schema: Sum, prompt: "hello" });
    assert(Sum.safeParse(object).success, JSON.stringify(object));
  },
  "a required tool is run and its result sent back": async () => {
    const { calls, tools: functions } = tools();
    const said = await generateText({
      ...given, prompt: "hello", tools: functions, maxOutputTokens: 200, stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    });
    assert(calls.length > 0 && said.steps.length === 2, `${calls.length} calls, ${said.steps.length} steps`);
    await generateText({
      ...given, maxOutputTokens: 4,
      messages: [{ role: "user", content: "hello" }, ...said.response.messages, { role: "user", content: "more" }],
    });
  },
  "a named tool is run in a stream": async () => {
    const { calls, tools: functions } = tools();
    const stream = streamText({
      ...given, prompt: "hello", tools: functions, toolChoice: { type: "tool", toolName: "add" }, maxOutputTokens: 200,
    });
    await stream.consumeStream();
    assert(calls.length === 1, `${calls.length} calls`);
    assert((await stream.finishReason) === "tool-calls", await stream.finishReason);
  },
  "reasoning of another model is dropped": async () => {
    const content = [{ type: "reasoning", text: "hm" }, { type: "text", text: "yes" }];
    await generateText({
      ...given, maxOutputTokens: 4,
      messages: [{ role: "user", content: "hello" }, { role: "assistant", content }, { role: "user", content: "more" }],
    });
  },
});
