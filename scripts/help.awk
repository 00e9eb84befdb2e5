# Print the `target: ... ## what it does` lines of a Makefile, then the variables.
BEGIN {
    FS = ":.*## "
    print "NibbleKV: language models with an int8 or int4 KV cache.\n\nTwo commands to begin with: make demo, make test\n"
}
/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $1, $2 }
END {
    print "\nVariables (make engine MODEL=smollm2-135m KV=int4):"
    print "  MODEL        a recipe of recipes/models, a folder with a Hugging Face model, or a hub id"
    print "  KV           a recipe of recipes/kv: fp16 int8 k8v4 int4 int8-static int4-static mixed"
    print "  PROMPTS      calibration prompts: file.jsonl, file.txt or a hub data set"
    print "  N, SEED      how many prompts, and which"
    print "  SEARCH       1: measure each format in each layer and choose the mix that KV=mixed builds"
    print "  HOST         native (default) or trtllm"
    print "  CONTEXT      longest sequence, in tokens"
    print "  BATCH        sequences at once"
    print "  PORT         HTTP port of the server; gRPC is the next one, metrics the one after"
    print "  KV_FALLBACK  fp16: serve the engine with an fp16 cache"
    print "  CERTIFICATE  refuse, fallback, warn or ignore: what serving does without a valid certificate"
    print "  BESIDE, SPLIT  more engines of the model, such as fp16, and their shares: int4=90,fp16=10"
    print "  QUEUE, POOL_MB  requests that may wait; size of the KV pool in MiB"
    print "  OPENAI_PORT  port of the OpenAI-compatible front (default: PORT + 3); 0: no front"
    print "  OPENAI_HOST, OPENAI_KEYS, OPENAI_NO_KEYS  its address, its file of API keys, 1: go without keys"
    print "  TRITON       host:port of the gRPC that make front talks to"
    print "  TRACE        file for Triton traces, or the URL of an OpenTelemetry collector"
    print "  TARGET, REGISTRY, ENGINE  the image to build (cpu, gpu, trtllm), where to push it, the engine to bake in"
    print "  SOAK_MINUTES, STREAMS  how long the soak runs, with how many clients at once"
    print "  QUICK, PLAN  1: evaluate on less text; or a plan of recipes/eval: full, quick, long"
    print "  GPU          a100-40 a100-80 h100 h200 l4 l40s rtx4090, for advice"
    print "  CONCURRENCY  requests at once, for advice"
    print "  PYTHON       interpreter for .venv, 3.11 or 3.12"
}
