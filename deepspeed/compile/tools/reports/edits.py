# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: {file: {anchor: new text}}. In the text, ``...`` stands for the anchor."""

EDITS = {
    "setup.py": {
        # The base's own setup.py looks for no commit if DS_BUILD_STRING is set.
        "# Build specifiers like .devX can be added at install time.": (
            "git_hash = os.environ.get('DS_FORK_COMMIT', git_hash)\n\n..."
        ),
        (
            "      author='DeepSpeed Team',\n"
            "      author_email='info@deepspeedai.com',\n"
            "      url='http://deepspeed.ai',\n"
            "      project_urls={\n"
            "          'Documentation': 'https://deepspeed.readthedocs.io',\n"
            "          'Source': 'https://github.com/deepspeedai/DeepSpeed',\n"
            "      },\n"
        ): "      author='the authors of this fork of DeepSpeed',\n      url=os.environ.get('DS_FORK_HOME'),\n",
    },
    "deepspeed/env_report.py": {
        '    print("DeepSpeed general environment info:")\n': "    report.extend(ds_report.report())\n...",
        "    max_dots = 33\n": "...    from deepspeed.compile.tools.reports import ds_report\n",
        "{deepspeed.__git_hash__}": "{ds_report.commit()}",
    },
}
