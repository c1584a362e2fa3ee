"""The only home of processes: a warm pool of rank processes, and the same entry under torchrun.

    pool.RankPool ──control──▶ zygote (torch imported once) ──fork──▶ rank · rank · rank
          └──────────────────── one socket pair a rank ───────────────┘

Nothing here imports torch in the caller's process.
"""
