# %% [markdown]
# # The best speculation tree, from Python
#
# What `treeopt run` does, step by step, on the embedded demo model. Open it in an editor that knows `# %%` cells, or
# run it as it is. With a model of your own: `treeopt.open("MODEL", drafter="HEADS", prompts="prompts.jsonl")`.

# %%
import treeopt

PROMPTS, TOKENS, SECONDS = 64, 64, 30
RUN = "notebook-run"  # the run directory: every result is kept there

# %% [markdown]
# The model is loaded once and passed to each step.

# %%
session = treeopt.open("demo", drafter="medusa", run=RUN)

# %% [markdown]
# What does the drafter guess right? The trace has for every state the rank at which each head had the token that
# really came.

# %%
trace = treeopt.calibrate(session, run=RUN, num_prompts=PROMPTS, max_new_tokens=TOKENS)
trace

# %%
trace.plot("accuracy")

# %% [markdown]
# What does a step cost, by tree size?

# %%
profile = treeopt.profile(session, run=RUN, batch_sizes=[1, 4], time_limit_s=SECONDS)
profile

# %%
profile.plot("latency")

# %% [markdown]
# The tree with the best throughput for each batch size. Figures are held out, with error bars.

# %%
plan = treeopt.search(trace, profile, budget=64)
plan

# %%
plan.plot("throughput")

# %%
plan[4].tree

# %% [markdown]
# A published tree beside it, on the same trace.

# %%
treeopt.score("mc_sim_7b_63", trace)

# %% [markdown]
# Is it true? Held-out prompts are decoded for real, with the chosen tree, without one, and with others.

# %%
result = treeopt.bench(plan, session, run=RUN, batch_size=1)
result

# %%
result.plot("contenders")

# %% [markdown]
# The configuration of the engine that you deploy on; an engine of one tree is told for which batch size.

# %%
if plan[1].speculates:
    print(plan.export("medusa", f"{RUN}/medusa", batch_size=1).files)
