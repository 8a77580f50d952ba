"""Public traces by short name: which file, from where, under which licence, with which digest.

The files are not part of this project. `files` lists what is accepted: the unchanged file as published, or a
derived one, each with its SHA-256. Derived files were made from the published ones by keeping columns; the
ServeGen ones are drawn from published per-client distributions, so they are synthetic.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownTrace:
    """files: (path under a trace directory, SHA-256), the preferred one first. format: of `READERS`."""

    name: str
    files: tuple[tuple[str, str], ...]
    format: str
    source: str
    licence: str
    note: str = ""

    @property
    def where(self) -> str:
        """One line for reports: where to get it and how to know it."""
        digests = " or ".join(f"{path} (sha256 {digest})" for path, digest in self.files)
        return f"{digests}; source {self.source}, {self.licence}{'. ' if self.note else ''}{self.note}"


_AZURE = "https://github.com/Azure/AzurePublicDataset/blob/b469a113cedca53ddc3bdea71a143dc4b7d8700c/data/"
_MOONCAKE = "https://github.com/kvcache-ai/Mooncake/blob/3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release/traces/"
_SERVEGEN = "https://github.com/alibaba/ServeGen/tree/f891d1189eb32b3868dfc443800c4150548c282a/data/"
_AGENTS = "https://github.com/callanjfox/kv-cache-tester/tree/94f6046dfd9c0c8bc0cdb24a5aa6579bac8669bf/traces"
_SARATHI = (
    "https://github.com/microsoft/sarathi-serve/tree/72339db5b120614033b317880ad3a05a5e4c9415/"
    "data/processed_traces"
)
_VIDUR = (
    "https://github.com/microsoft/vidur/tree/7d47513363ec447a741ac5e47241580b47724fbf/data/processed_traces"
)
_APEX = "https://github.com/microsoft/apex_plus/tree/8769096536a34e8b3010fd444021f13858663a93/traces/llama"

_PATEL = "Credit: Patel et al., Splitwise, ISCA 2024"
_QIN = "Credit: Qin et al., Mooncake, FAST 2025"
_SAMPLED = "Derived and synthetic: drawn from the published client models with a fixed seed"
_PARTIAL = "Cut: 710 of 739 traces; the longest sessions are missing"


def _azure(name: str, file: str, digest: str) -> KnownTrace:
    files = ((f"azure_llm_2023/{file}", digest),)
    return KnownTrace(name, files, "azure", _AZURE + file, "CC-BY-4.0", _PATEL)


def _mooncake(name: str, file: str, packed: str, plain: str) -> KnownTrace:
    files = ((f"mooncake_fast25/{file}.gz", packed), (f"mooncake_fast25/{file}", plain))
    return KnownTrace(name, files, "mooncake", _MOONCAKE + file, "Apache-2.0", _QIN)


def _servegen(name: str, model: str, path: str, digest: str) -> KnownTrace:
    files = ((f"normalized/servegen_{model}_sampled.csv.gz", digest),)
    return KnownTrace(name, files, "normalized", _SERVEGEN + path, "Apache-2.0", _SAMPLED)


def _apex(name: str, kind: str, digest: str) -> KnownTrace:
    files = ((f"apex_plus/{kind}_05_llama_lengths.csv.gz", digest),)
    note = "Derived: sizes and times only; Poisson arrivals made by the source"
    return KnownTrace(name, files, "apex", _APEX, "MIT", note)


KNOWN_TRACES: dict[str, KnownTrace] = {
    trace.name: trace
    for trace in (
        _azure(
            "azure_conv",
            "AzureLLMInferenceTrace_conv.csv",
            "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        ),
        _azure(
            "azure_code",
            "AzureLLMInferenceTrace_code.csv",
            "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        ),
        _mooncake(
            "mooncake_conversation",
            "conversation_trace.jsonl",
            "f44195697c46b9cb97a5fc5f52756969104d6f7174e4c3a16484f7d3c46391a5",
            "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        ),
        _mooncake(
            "mooncake_synthetic",
            "synthetic_trace.jsonl",
            "06a1ba7f8991791d0f504774265a498816ed9d35522cd6a5337a738bc5b5f1ea",
            "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
        ),
        _servegen(
            "servegen_m_small",
            "m-small",
            "language/m-small",
            "4b827a34c9ce5a66027e502bca0c45a04d0ae91d7728c8da8bf2b2d20666155d",
        ),
        _servegen(
            "servegen_m_large",
            "m-large",
            "language/m-large",
            "0951c1d507222da95abee9304776ced5b22cd9dfeba64cf5fa2b305ddcb0d381",
        ),
        _servegen(
            "servegen_deepseek_r1",
            "deepseek-r1",
            "reason/deepseek-r1",
            "70e5a99885e5d4195c73b0ffcf21601255c48830099ce941e04fb29da6bda8ea",
        ),
        KnownTrace(
            "agent_turns",
            (
                (
                    "kv_cache_tester/request_lengths.csv.gz",
                    "3fea7a16228e48c445a4d4e6b8ab0f7dbebea27ef79c1b6ebb2cf8aca9dc6b6f",
                ),
            ),
            "agent_turns",
            _AGENTS,
            "Apache-2.0",
            f"Derived: columns picked, new_input_tokens computed. {_PARTIAL}",
        ),
        KnownTrace(
            "sharegpt_8k",
            (
                (
                    "sarathi_sharegpt/sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
                    "6d6c296302a853e2669a674a96f269283e60c57e60363bd450588a1066919f9f",
                ),
            ),
            "token_counts",
            _SARATHI,
            "Apache-2.0",
            "Sizes only, no times",
        ),
        KnownTrace(
            "arxiv_summarization",
            (
                (
                    "vidur_arxiv/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
                    "9d3580538d915ca75e4aaaa54590b42dbb17abc6d74c8913310cf07c232adcdc",
                ),
            ),
            "token_counts",
            _VIDUR,
            "MIT",
            "Sizes only, no times",
        ),
        _apex(
            "apex_creation", "creation", "714751ff537d2e1f3a4d92af3be26ff28deebf6bff3c75dfafb98d02615a42b0"
        ),
        _apex(
            "apex_summarization",
            "summarization",
            "8d9f07dbb089388b69cf835f053b449f90711ceb69c2db419f891b53d76ff164",
        ),
    )
}
