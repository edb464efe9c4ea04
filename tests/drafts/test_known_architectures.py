"""What becomes of every architecture of draft heads that vLLM, SGLang, speculators, SpecForge, NeMo Automodel
and ModelOpt name: a kind of ours, or a refusal by name."""

from pathlib import Path

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.draft_files import DraftFiles, open_draft
from eagle_kit.drafts.registry import find_kind

READ = {
    "LlamaForCausalLMEagle3": "eagle3",  # EAGLE, SGLang, SpecForge, ModelOpt
    "Eagle3LlamaForCausalLM": "eagle3",  # vLLM
    "Eagle3Qwen3ForCausalLM": "eagle3",
    "Eagle3Qwen2_5vlForCausalLM": "eagle3",
    "Eagle3Qwen3vlForCausalLM": "eagle3",
    "Eagle3MiniMaxM2ForCausalLM": "eagle3",
    "Eagle3DeepseekV2ForCausalLM": "eagle3",
    "Eagle3DeepseekV3ForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",  # speculators
    "Eagle3DraftModel": "eagle3",
    "LlamaEagle3DraftModel": "eagle3",  # NeMo
    "GptOssEagle3DraftModel": "eagle3",
    "Gemma4Eagle3DraftModel": "eagle3",
    "DeepseekV3Eagle3DraftModel": "eagle3",
    "LlamaForCausalLMEagle": "eagle1",  # SGLang
    "Qwen2ForCausalLMEagle": "eagle1",
    "EagleLlamaForCausalLM": "eagle1",  # vLLM
    "EagleMistralForCausalLM": "eagle1",
    "DFlashDraftModel": "dflash",  # z-lab, SGLang, vLLM, SpecForge, ModelOpt
    "DFlashSpeculator": "dflash",
    "Qwen3DFlashDraftModel": "dflash",  # NeMo
    "Qwen3DSparkModel": "dspark",  # DeepSpec, SGLang, vLLM, NeMo
    "DSparkDraftModel": "dspark",  # SpecForge
    "DSparkSpeculator": "dspark",
    "DeepseekV3ForCausalLMNextN": "mtp",  # SGLang
    "Glm4MoeForCausalLMNextN": "mtp",
    "Qwen3NextForCausalLMMTP": "mtp",
    "Qwen3_5ForCausalLMMTP": "mtp",
}
REFUSED = {
    "MedusaModel": "is Medusa heads",
    "MLPSpeculatorPreTrainedModel": "is an MLP speculator",
    "DFlash2DraftModel": "is a DFlash2 draft",
    "Qwen3DFlash2DraftModel": "is a DFlash2 draft",
    "DominoDraftModel": "is a Domino draft",
    "JetSpecDraftModel": "is a JetSpec draft",
    "XPressDraftModel": "is an XPress draft",
    "DFlareDraftModel": "is a DFlare draft",
    "VispecDraftModel": "is a ViSpec draft",
    "MultimodalEagleDraftModel": "is an MSD draft",
    "LlamaEagleDraftModel": "is an EAGLE-1 draft of NeMo",
    "KimiK3Eagle3DraftModel": "Kimi K3's layer",
    "Gemma4DSparkModel": "is a DSpark draft",
    "DeepseekV4DSparkModel": "is a DSpark draft",
    "DSparkV41DraftModel": "is a DSpark draft",
    "DeepseekV4ForCausalLMDSpark": "is a DSpark draft",
    "K3DSparkModel": "is a DSpark draft",
    "KimiK3DSparkModel": "is a DSpark draft",
    "Glm5_2DSparkModel": "is a DSpark draft",
    "MiniMaxM3DSparkModel": "is a DSpark draft",
    "EagleLlama4ForCausalLM": "a Llama 4 layer",
    "Llama4ForCausalLMEagle": "a Llama 4 layer",
    "EagleMiniCPMForCausalLM": "MiniCPM's layer",
    "EagleCohereForCausalLM": "Cohere's layer",
    "EagleMistralLarge3ForCausalLM": "an EAGLE-1 draft with latent attention",
    "EagleDeepSeekMTPModel": "an EAGLE-1 draft with latent attention",
    "MiMoMTPModel": "the architecture MiMoMTPModel",
    "MiMoV2MTPModel": "the architecture MiMoV2MTPModel",
    "Gemma4MTPModel": "the architecture Gemma4MTPModel",
    "Gemma4AssistantForCausalLM": "the architecture Gemma4AssistantForCausalLM",
    "MuseGlimmerAssistantModel": "the architecture MuseGlimmerAssistantModel",
    "ErnieMTPModel": "the architecture ErnieMTPModel",
    "NemotronHMTPModel": "the architecture NemotronHMTPModel",
    "LongCatFlashMTPModel": "the architecture LongCatFlashMTPModel",
    "LongcatFlashForCausalLMNextN": "the architecture LongcatFlashForCausalLMNextN",
    "BailingMoeForCausalLMNextN": "the architecture BailingMoeForCausalLMNextN",
    "SomebodysEagleForCausalLM": "the architecture SomebodysEagleForCausalLM",
}


def named(architecture: str, folder: Path) -> DraftFiles:
    """A folder whose config has nothing but an architecture."""
    (folder / "config.json").write_text(f'{{"architectures": ["{architecture}"]}}')
    return open_draft(folder)


@pytest.mark.parametrize("architecture", READ)
def test_architectures_of_our_kinds(tmp_path, architecture):
    assert find_kind(named(architecture, tmp_path)).name == READ[architecture]


@pytest.mark.parametrize("architecture", REFUSED)
def test_architectures_of_other_kinds_are_refused_by_name(tmp_path, architecture):
    with pytest.raises(UserError, match=REFUSED[architecture]) as error:
        find_kind(named(architecture, tmp_path))
    assert architecture in error.value.cause
    assert "engine it was made for" in error.value.remedy
