"""Credentials and settings in the profiles of AWS: `~/.aws/config` and `~/.aws/credentials`.

Profiles with keys, and those with a `credential_process`, are read here. Others, such as those of SSO or with roles,
need the package botocore.
"""

import configparser
import json
import os
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from .interface import StorageError

_PROCESS_DEADLINE_S = 60.0
_OF_BOTOCORE = ("sso_session", "sso_start_url", "role_arn", "login_session", "credential_source")


def profile_settings(*, with_keys: bool, name: str | None = None) -> dict[str, str]:
    """Return the settings of a profile, see `Access`.

    Args:
        with_keys: Whether credentials are needed, too.
        name: The profile; None: the one of AWS_PROFILE, or `default`, which may be missing.

    Raises:
        StorageError: The profile does not exist, or has no credentials that can be used.
    """
    asked = name or os.environ.get("AWS_PROFILE")
    profile = asked or "default"
    there = _read_profile(profile)
    if there is None:
        if asked and with_keys:
            raise StorageError(
                f"the profile {profile} of AWS does not exist in ~/.aws/config or ~/.aws/credentials"
            )
        return {}
    found = {}
    if "region" in there:
        found["aws_region"] = there["region"]
    if "endpoint_url" in there:
        found["aws_endpoint"] = there["endpoint_url"]
    if with_keys:
        found |= _keys(profile, there)
    return found


def _read_profile(name: str) -> dict[str, str] | None:
    """Return the settings of a profile in both files; None if it does not exist."""
    files = (
        ("AWS_CONFIG_FILE", "~/.aws/config", "default" if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name),
    )
    found: dict[str, str] | None = None
    for variable, default, section in files:
        path = Path(os.environ.get(variable) or default).expanduser()
        parser = configparser.ConfigParser(interpolation=None, strict=False, default_section="")
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError) as exc:
            raise StorageError(f"{path} cannot be read: {str(exc).splitlines()[0]}") from exc
        if parser.has_section(section):
            found = (found or {}) | dict(parser.items(section))
    return found


def _keys(profile: str, there: dict[str, str]) -> dict[str, str]:
    if "aws_access_key_id" in there:
        names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        return {name: there[name] for name in names if name in there}
    if "credential_process" in there:
        return {"profile": profile} | _run_process(profile, there["credential_process"])
    if any(name in there for name in _OF_BOTOCORE):
        return {"profile": profile} | _from_botocore(profile)
    return {}


def _run_process(profile: str, command: str) -> dict[str, str]:
    try:
        done = subprocess.run(
            shlex.split(command),
            capture_output=True,
            timeout=_PROCESS_DEADLINE_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        found = json.loads(done.stdout)
        keys = {"aws_access_key_id": found["AccessKeyId"], "aws_secret_access_key": found["SecretAccessKey"]}
        if found.get("SessionToken"):
            keys["aws_session_token"] = found["SessionToken"]
        if found.get("Expiration"):
            expires = datetime.fromisoformat(found["Expiration"])
            keys["expires"] = (expires if expires.tzinfo else expires.replace(tzinfo=UTC)).isoformat()
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as exc:
        raise StorageError(
            f"the credential_process of the profile {profile} of AWS failed: {type(exc).__name__}"
        ) from exc
    return keys


def _from_botocore(profile: str) -> dict[str, str]:
    try:
        import botocore.session  # type: ignore[import-untyped]
    except ImportError as exc:
        raise StorageError(
            f"the profile {profile} of AWS uses SSO or a role, which needs the package botocore: pip install botocore"
        ) from exc
    try:
        credentials = botocore.session.Session(profile=profile).get_credentials()
        keys = credentials.get_frozen_credentials()
    except Exception as exc:  # botocore's errors have no useful common base
        raise StorageError(f"the profile {profile} of AWS has no credentials: {exc}") from exc
    found = {"aws_access_key_id": keys.access_key, "aws_secret_access_key": keys.secret_key}
    if keys.token:
        found["aws_session_token"] = keys.token
    expires = getattr(credentials, "_expiry_time", None)
    return found | ({"expires": expires.isoformat()} if expires is not None else {})
