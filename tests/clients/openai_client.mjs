// OpenAI's JavaScript client: what it returns is sent back as it is.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { assert, image, key, model, run, schema, url } from "./checks.mjs";

const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const hello = { role: "user", content: "hello" };
const Sum = z.object({ a: z.union([z.literal(1), z.literal(2)]), b: z.union([z.literal(3), z.literal(4)]) });
const add = { type: "function", function: { name: "add", description: "Adds two numbers.", parameters: schema } };
const ask = (messages, fields = {}) =>
  client.chat.completions.create({ model, messages: [hello, ...messages], max_tokens: 4, ...fields });
const resultsOf = (message) =>
  message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "5" }));

await run({
  "models are listed": async () => {
    const { data } = await client.models.list();
    assert(data.length === 1 && data[0].id === model);
  },
  "an image at low detail": async () => {
    const part = { type: "image_url", image_url: { url: image, detail: "low" } };
    await ask([{ role: "user", content: [{ type: "text", text: "what is it" }, part] }]);
  },
  "a stream is the whole answer, and is sent back": async () => {
    const fields = { temperature: 0, max_tokens: 12 };
    const whole = (await ask([], fields)).choices[0].message;
    const stream = client.chat.completions.stream({ model, messages: [hello], ...fields });
    const streamed = await stream.finalMessage();
    assert(streamed.content === whole.content, "they differ");
    await ask([whole, hello]);
    await ask([streamed, hello]);
  },
  "a parsed answer is sent back": async () => {
    const said = await client.chat.completions.parse({
      model, messages: [hello], response_format: zodResponseFormat(Sum, "sum"),
    });
    const { message } = said.choices[0];
    assert(Sum.safeParse(message.parsed).success, JSON.stringify(message));
    await ask([message, hello]);
  },
  "parsed tool calls are sent back, streamed or not": async () => {
    const tool = zodFunction({ name: "add", parameters: Sum, description: "Adds two numbers." });
    const fields = { model, messages: [hello], tools: [tool], tool_choice: "required", parallel_tool_calls: false };
    const whole = (await client.chat.completions.parse(fields)).choices[0].message;
    const streamed = await client.chat.completions.stream(fields).finalMessage();
    for (const message of [whole, streamed]) {
      assert(message.tool_calls.length > 0, "no call");
      assert(message.tool_calls.every((call) => Sum.safeParse(call.function.parsed_arguments).success), "not parsed");
      await ask([message, ...resultsOf(message)], { tools: [add] });
    }
  },
  "the tool runner runs a tool": async () => {
    let called = 0;
    const runner = client.chat.completions.runTools({
      model, messages: [hello], max_tokens: 200, tool_choice: { type: "function", function: { name: "add" } },
      tools: [{ type: "function", function: { ...add.function, parse: JSON.parse, function: () => String(++called) } }],
    });
    await runner.done();
    assert(called === 1, `it was called ${called} times`);
  },
  "fields that change nothing are accepted": async () => {
    await ask([], { metadata: { a: "b" }, store: true, service_tier: "flex", prompt_cache_key: "x" });
  },
  "responses are sent back": async () => {
    const said = await client.responses.create({ model, input: [hello], max_output_tokens: 16 });
    await client.responses.create({ model, input: [hello, ...said.output, hello], max_output_tokens: 16 });
  },
  "errors have the client's classes": async () => {
    const error = await ask([], { reasoning_effort: "high" }).then(() => null, (refused) => refused);
    assert(error instanceof OpenAI.BadRequestError && error.param === "reasoning_effort", String(error));
  },
});
