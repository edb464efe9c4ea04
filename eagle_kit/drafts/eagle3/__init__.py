"""EAGLE-3 (arXiv 2503.01840), with a Llama layer or latent attention.

Where the parts of the algorithm are:

    draft model (section 3.1)
        fusion g = fc([l; m; h])           head.py, Eagle3Head.fuse
        decoder layer                      head.py, Eagle3Layer
        a to the next step                 head.py, Eagle3Head.feed_back
        LM head                            head.py, norm_for_lm_head; models/draft_head.py, DraftHead.logits
        draft vocabulary (d2t, t2d)        drafts/base/captured_states.py; data/chat/vocab_map.py chooses it
    training-time test (section 3.2)
        tokens, teachers and loss mask     eagle_kit/objective/align.py
        the K steps                        eagle_kit/objective/ttt.py, first_step and later_step
        attention masks (figure 6)         eagle_kit/objective/step_parts.py, step_attention
        weights of the steps               eagle_kit/objective/batch.py, row_weights
        loss                               eagle_kit/objective/loss.py over ops/draft_loss
    drafting
        entries of the draft's cache       eagle_kit/drafts/base/cycle_state.py, a picture
        a draft step, chains, trees        eagle_kit/drafts/base/autoregressive.py
        expansion, reranking (EAGLE-2)     eagle_kit/ops/tree_build/reference.py, grow_beam and tree_build
        verification                       eagle_kit/verify/verifiers.py and accept_window.py over ops/accept
        the cycle of all of them           eagle_kit/engine/cycle.py

The published recipe is ``recipes/studies/smollm2-135m-eagle3-published.yaml``. The defaults depart from it in
``lm_head_init``, ``loss_rows``, ``loss_normalisation``, ``learning_rate`` and its
schedule; the options say what is published. The verifier and the sizes of trees differ from the published
code too, see ``TargetOnly`` (``verify/verifiers.py``) and ``SpecShape`` (``core/shape.py``).

``kind.py`` and ``fused_states_kind.py`` read, write and check files; ``format.py`` converts them to and from
the layouts of other projects.
"""
