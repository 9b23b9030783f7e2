"""Speech: wav2vec 2.0 with a CTC head on waveforms of varying length, padded in the batch."""

import torch
from common import device, options
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

args = options(4)
gpu = device()
model = Wav2Vec2ForCTC(
    Wav2Vec2Config(
        vocab_size=32,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        conv_dim=(48,) * 7,
        num_conv_pos_embeddings=32,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.0,
        mask_time_prob=0.05,
        ctc_zero_infinity=True,
    )
).to(gpu)
model.freeze_feature_encoder()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
sounds = [
    (torch.randn(int(length)), torch.randint(1, 32, (8,)))
    for length in torch.randint(8000, 24000, (256,))
]


def padded(rows):
    waves = torch.nn.utils.rnn.pad_sequence([wave for wave, _ in rows], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones(len(wave), dtype=torch.long) for wave, _ in rows], batch_first=True
    )
    return waves, mask, torch.stack([label for _, label in rows])


for waves, mask, labels in torch.utils.data.DataLoader(
    sounds, args.batch_size, shuffle=True, collate_fn=padded
):
    loss = model(waves.to(gpu), attention_mask=mask.to(gpu), labels=labels.to(gpu)).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.3f}")
