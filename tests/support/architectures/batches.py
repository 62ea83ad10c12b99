# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Batches that the architectures are trained on: the same for the same seed and number of rows."""

import torch

VOCABULARY = 96
LENGTH = 20  # tokens
PAD, BOS, EOS, MASK, IMAGE = 0, 1, 2, 3, 4  # tokens; IMAGE stands where the features of an image go
FIRST_TOKEN = 8  # the first one that means nothing in particular
CLASSES = 5
SAMPLES = 1600  # of audio
MEL_BINS, FRAMES = 16, 40


def draw(seed):
    return torch.Generator().manual_seed(seed)


def random_tokens(generator, rows, length=LENGTH):
    return torch.randint(FIRST_TOKEN, VOCABULARY, (rows, length), generator=generator)


def random_pixels(generator, rows, size, channels=3):
    return torch.randn(rows, channels, size, size, generator=generator)


def prompts_ignored(ids, generator):
    """Labels for the ids, without those of the first one to four tokens of every row."""
    lengths = torch.randint(1, 5, (len(ids), 1), generator=generator)
    return ids.masked_fill(torch.arange(ids.shape[1]) < lengths, -100)


def padding(ids):
    """A mask that hides the last tokens of every other row."""
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    return mask


def tokens(seed, rows):
    """What causal language models are trained on."""
    generator = draw(seed)
    ids = random_tokens(generator, rows)
    return {"input_ids": ids, "labels": prompts_ignored(ids, generator)}


def masked_tokens(seed, rows):
    """What encoders are trained on: to fill in a quarter of the tokens, beside padding."""
    generator = draw(seed)
    ids = random_tokens(generator, rows)
    mask = padding(ids)
    hidden = (torch.rand(ids.shape, generator=generator) < 0.25) & (mask == 1)
    hidden[:, 1] = True
    return {
        "input_ids": ids.masked_fill(hidden, MASK).masked_fill(mask == 0, PAD),
        "attention_mask": mask,
        "labels": ids.masked_fill(~hidden, -100),
    }


def whole_masked_tokens(seed, rows):
    """The same without padding, for models that take no mask."""
    generator = draw(seed)
    ids = random_tokens(generator, rows)
    hidden = torch.rand(ids.shape, generator=generator) < 0.25
    hidden[:, 1] = True
    return {"input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, -100)}


def labelled_tokens(seed, rows):
    """A class for every row of tokens."""
    batch = masked_tokens(seed, rows)
    return {**batch, "labels": torch.randint(CLASSES, (rows,), generator=draw(seed + 1))}


def sequence_pairs(seed, rows):
    """Sequences of tokens to be turned into shorter ones."""
    generator = draw(seed)
    ids = random_tokens(generator, rows)
    mask = padding(ids)
    labels = random_tokens(generator, rows, LENGTH - 4)
    labels[::2, -2:] = -100
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask, "labels": labels}


def labelled_pixels(seed, rows, size=16):
    """A class for every image."""
    generator = draw(seed)
    return {
        "pixel_values": random_pixels(generator, rows, size),
        "labels": torch.randint(CLASSES, (rows,), generator=generator),
    }


def segmented_pixels(seed, rows, size=32):
    """A class for every pixel, but for some without."""
    generator = draw(seed)
    labels = torch.randint(CLASSES, (rows, size, size), generator=generator)
    labels[:, :2] = 255
    return {"pixel_values": random_pixels(generator, rows, size), "labels": labels}


def labelled_video(seed, rows, size=16, frames=4):
    """A class for every video."""
    generator = draw(seed)
    return {
        "pixel_values": torch.randn(rows, frames, 3, size, size, generator=generator),
        "labels": torch.randint(CLASSES, (rows,), generator=generator),
    }


def masked_pixels(seed, rows, size=16, patch=4):
    """Images of which some patches are hidden."""
    generator = draw(seed)
    hidden = torch.rand(rows, (size // patch) ** 2, generator=generator) < 0.5
    return {"pixel_values": random_pixels(generator, rows, size), "bool_masked_pos": hidden}


def transcribed_audio(seed, rows):
    """Audio with a few tokens that are said in it."""
    generator = draw(seed)
    return {
        "input_values": torch.randn(rows, SAMPLES, generator=generator),
        "labels": random_tokens(generator, rows, 6),
    }


def labelled_spectrograms(seed, rows):
    """A class for every spectrogram."""
    generator = draw(seed)
    return {
        "input_values": torch.randn(rows, FRAMES, MEL_BINS, generator=generator),
        "labels": torch.randint(CLASSES, (rows,), generator=generator),
    }


def transcribed_features(seed, rows, frames_last=False):
    """Spectrograms with what is said in them; frames come last, or before their features."""
    generator = draw(seed)
    features = torch.randn(rows, FRAMES, MEL_BINS, generator=generator)
    labels = random_tokens(generator, rows, 12)
    labels[::2, -2:] = -100
    return {"input_features": features.transpose(1, 2).contiguous() if frames_last else features, "labels": labels}


def contrasted_images(seed, rows, size=16):
    """Images and texts of which those in the same row belong together."""
    generator = draw(seed)
    ids = random_tokens(generator, rows, LENGTH - 4)
    ids[:, -1] = EOS
    return {"input_ids": ids, "pixel_values": random_pixels(generator, rows, size), "return_loss": True}


def described_images(seed, rows, size=16, places=4, type_of_images=None):
    """Images with texts in which ``places`` tokens stand for the image.

    Models that tell images from text by types of tokens, 0 and 1, need to know which the type of images is.
    """
    generator = draw(seed)
    ids = random_tokens(generator, rows, LENGTH + places)
    ids[:, 1 : 1 + places] = IMAGE
    labels = prompts_ignored(ids, generator).masked_fill(ids == IMAGE, -100)
    batch = {"input_ids": ids, "pixel_values": random_pixels(generator, rows, size), "labels": labels}
    if type_of_images is not None:
        batch["token_type_ids"] = ((ids == IMAGE) == bool(type_of_images)).long()
    return batch


def captioned_images(seed, rows, size=16):
    """Images with texts, without tokens that stand for the image."""
    return described_images(seed, rows, size, places=0)


def several_images(seed, rows, size=16, places=4):
    """The same as ``described_images`` where a row may have several images, here one."""
    batch = described_images(seed, rows, size, places)
    return {**batch, "pixel_values": batch["pixel_values"].unsqueeze(1)}


def patched_images(seed, rows, grid=4, patch=4, merged=2):
    """Images as a list of all their patches, for two frames each, as Qwen's models take them."""
    batch = described_images(seed, rows, places=(grid // merged) ** 2)
    batch["pixel_values"] = torch.randn(rows * grid * grid, 3 * 2 * patch * patch, generator=draw(seed + 1))
    batch["image_grid_thw"] = torch.tensor([[1, grid, grid]] * rows)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    return batch
