"""How to reach an object store: its endpoint, its region, and credentials, found where each platform keeps them.

Settings come from, in this order: the URI, the environment, Hadoop's settings (`fs.*`) if a job has some, and for S3
the profile of AWS. If there are no credentials among them, obstore asks the platform: web identity, the container, or
the machine. That happens on each machine by itself; everything else travels with tasks (`KnownAccess`).
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from .aws_profile import profile_settings
from .interface import StorageError
from .storage_uri import AZURE, GCS, PUBLIC_OPTIONS, S3, StorageURI, local_path, parse_place

_KEY, _SECRET, _TOKEN = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"
PROFILE, EXPIRES = "profile", "expires"
"""The profile that temporary credentials are from, and when they expire; these are not settings of obstore."""
_ENDPOINTS = ("aws_endpoint_url_s3", "aws_endpoint_url", "aws_endpoint")
_AWS = re.compile(
    "aws_(?:"
    "access_key_id|secret_access_key|session_token|region|default_region|endpoint|endpoint_url|"
    "endpoint_url_s3|allow_http|virtual_hosted_style_request|unsigned_payload|skip_signature|"
    "checksum_algorithm|s3_express|request_payer|server_side_encryption|sse_kms_key_id|"
    "sse_bucket_key_enabled|sse_customer_key_base64|disable_bulk_delete)"
)
_AZURE = re.compile(
    "azure_(?:"
    "storage_account_name|storage_account_key|storage_access_key|storage_sas_key|storage_sas_token|"
    "storage_token|storage_client_id|storage_client_secret|storage_tenant_id|client_id|client_secret|"
    "tenant_id|authority_host|storage_endpoint|endpoint|storage_use_emulator|skip_signature|"
    "encryption_key|storage_connection_string)"
)
_GOOGLE = re.compile(
    "google_(?:"
    "application_credentials|service_account|service_account_key|service_account_path|bearer_token|"
    "base_url|skip_signature)"
)
_URI_OPTIONS = {
    "region": "aws_region",
    "access_key": _KEY,
    "secret_key": _SECRET,
    "session_token": _TOKEN,
    "endpoint_override": "aws_endpoint",
    "allow_http": "aws_allow_http",
}
HadoopSettings = Callable[[], Mapping[str, str]]
"""Returns the settings of Hadoop's file systems, such as `fs.s3a.endpoint`."""
_HADOOP_S3 = {
    "access.key": _KEY,
    "secret.key": _SECRET,
    "session.token": _TOKEN,
    "endpoint": "aws_endpoint",
    "endpoint.region": "aws_region",
}


@dataclass(frozen=True, slots=True, repr=False)
class Access:
    """The settings of an object store. Can be pickled; its text has no secrets.

    Attributes:
        settings: Names and values, as in the environment but in lower case, such as `aws_region`.
    """

    settings: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"Access({', '.join(name for name, _ in self.settings)})"

    def options(self) -> dict[str, str]:
        """Return the settings for obstore, deltalake and others that use Rust's object_store. They have secrets."""
        return {name: value for name, value in self.settings if name not in (PROFILE, EXPIRES)}

    def get(self, name: str) -> str | None:
        return dict(self.settings).get(name)

    def renewed(self) -> "Access":
        """Return the settings with new keys from their profile if the keys have expired. Raises StorageError."""
        if not is_expired(self.get(EXPIRES)):
            return self
        found = dict(self.settings) | profile_settings(with_keys=True, name=self.get(PROFILE))
        return Access(tuple(sorted(found.items())))


known: dict[str, tuple[str, Access]] = {}
"""The settings found or received in this process, and the place for which they were found, by bucket."""


@dataclass(frozen=True, slots=True, repr=False)
class KnownAccess:
    """The settings of all buckets that a process uses, for the tasks that it sends to others. Can be pickled."""

    buckets: tuple[tuple[str, Access], ...]

    def keep(self) -> None:
        """Use these settings in this process."""
        known.update({bucket: ("", access) for bucket, access in self.buckets})


def known_access() -> KnownAccess:
    """Return the settings of all places that were used in this process. Expired keys of profiles are found again."""
    for bucket, (place, access) in list(known.items()):  # other threads may add some
        if place:
            known[bucket] = place, access.renewed()
    return KnownAccess(tuple((bucket, access) for bucket, (_, access) in list(known.items())))


def keep_secrets(place: str, hadoop: HadoopSettings = dict) -> str:
    """Find the settings to reach a place, keep them in this process, and return the place without secrets.

    Args:
        place: A path or a URI, see `storage_at`. The secrets of its URI are used in this process from now on.
        hadoop: Returns Hadoop's settings, if they may have some for the place.

    Raises:
        StorageError: A profile or a file of credentials cannot be used, a setting is missing, the place is not one
            of `local_path`, or an option after its question mark is unknown.
    """
    if local_path(place) is None and (uri := parse_place(place)).kind in (S3, GCS, AZURE):
        access_to(uri, hadoop)
        return str(uri.without_secrets())
    return place


def access_to(uri: StorageURI, hadoop: HadoopSettings = dict) -> Access:
    """Return the settings to reach a bucket; find them unless they are known. Raises the errors of `keep_secrets`."""
    bucket = str(uri._replace(scheme=uri.kind, path="", options={}).without_secrets())
    if uri.secret or uri.options.keys() - PUBLIC_OPTIONS or bucket not in known:
        known[bucket] = str(uri), _find(uri, hadoop)
    return known[bucket][1]


def _find(uri: StorageURI, hadoop: HadoopSettings) -> Access:
    _check_options(uri)
    find = {S3: _s3_settings, GCS: _google_settings, AZURE: _azure_settings}[uri.kind]
    return Access(tuple(sorted(find(uri, hadoop).items())))


def _check_options(uri: StorageURI) -> None:
    """Check the names of options, which are not shown: they may be secret. Raises StorageError."""
    names = {*_URI_OPTIONS, "scheme"} if uri.kind == S3 else set()
    if unknown := len(uri.options.keys() - names):
        what = "an unknown option" if unknown == 1 else "unknown options"
        there = f"there may be {', '.join(sorted(names))}" if names else "such URLs have no options"
        raise StorageError(
            f"the URL {uri.without_secrets()} has {what} after its question mark ({there}); names of folders cannot "
            "have a question mark"
        )


def is_expired(time: str | None) -> bool:
    """Whether keys expire within a minute; `time` is None if they do not."""
    return time is not None and datetime.fromisoformat(time) < datetime.now(UTC) + timedelta(minutes=1)


def _environment(names: re.Pattern[str]) -> dict[str, str]:
    """Return variables by their names in lower case. Those that are only valid on this machine are not among them."""
    return {
        name.lower(): value for name, value in os.environ.items() if value and names.fullmatch(name.lower())
    }


# ---------------------------------------------------------------------- S3


def _s3_settings(uri: StorageURI, hadoop: HadoopSettings) -> dict[str, str]:
    settings = {_URI_OPTIONS[name]: value for name, value in uri.options.items() if name in _URI_OPTIONS}
    if uri.secret:
        settings[_KEY], settings[_SECRET] = uri.user, uri.secret
    if (endpoint := settings.get("aws_endpoint")) and "://" not in endpoint:
        settings["aws_endpoint"] = f"{uri.options.get('scheme', 'https')}://{endpoint}"
    ambient = _environment(_AWS)
    endpoint = next((ambient[name] for name in _ENDPOINTS if name in ambient), None)
    ambient = {name: value for name, value in ambient.items() if name not in _ENDPOINTS}
    if endpoint is not None:
        ambient["aws_endpoint"] = endpoint
    if "aws_default_region" in ambient:
        ambient.setdefault("aws_region", ambient.pop("aws_default_region"))
    _add(settings, ambient)
    _add(settings, _hadoop_s3(uri.host, hadoop()))
    machine = "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ
    _add(settings, profile_settings(with_keys=_KEY not in settings and not machine))
    if (bundle := os.environ.get("AWS_CA_BUNDLE")) is not None:
        settings["root_certificate"] = _read(Path(bundle), "AWS_CA_BUNDLE")
    endpoint = settings.get("aws_endpoint", "https://")
    if not endpoint.startswith(("http://", "https://")):
        raise StorageError(f"the endpoint {endpoint} of S3 must begin with http:// or https://")
    if endpoint.startswith("http://"):
        settings["aws_allow_http"] = "true"
    return settings


def _add(settings: dict[str, str], more: Mapping[str, str]) -> None:
    """Add settings that are missing. A key, its secret and its token are only used together."""
    keys = {_KEY, _SECRET, _TOKEN, PROFILE, EXPIRES}
    skipped = keys if _KEY in settings else set()
    for name, value in more.items():
        if name not in skipped:
            settings.setdefault(name, value)


def _hadoop_s3(bucket: str, conf: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for prefix in ("fs.s3a.", f"fs.s3a.bucket.{bucket}."):
        found |= {
            ours: conf[prefix + theirs] for theirs, ours in _HADOOP_S3.items() if prefix + theirs in conf
        }
    if (endpoint := found.get("aws_endpoint")) and "://" not in endpoint:
        secure = conf.get("fs.s3a.connection.ssl.enabled", "true") == "true"
        found["aws_endpoint"] = f"{'https' if secure else 'http'}://{endpoint}"
    return found


# ---------------------------------------------------------------------- Google and Azure


def _google_settings(uri: StorageURI, hadoop: HadoopSettings) -> dict[str, str]:
    settings = _environment(_GOOGLE)
    for name in ("google_service_account", "google_service_account_path"):
        if path := settings.pop(name, None):
            settings.setdefault("google_application_credentials", path)
    if not settings.keys() - {"google_base_url"}:
        conf = hadoop()
        for name in (
            "fs.gs.auth.service.account.json.keyfile",
            "google.cloud.auth.service.account.json.keyfile",
        ):
            if name in conf:
                settings["google_application_credentials"] = conf[name]
    if (path := settings.get("google_application_credentials")) is not None:
        text = _read(Path(path), "GOOGLE_APPLICATION_CREDENTIALS")
        try:
            kind = json.loads(text)["type"]
        except (ValueError, KeyError, TypeError):
            raise StorageError(
                f"{path} (from GOOGLE_APPLICATION_CREDENTIALS) has no credentials of Google"
            ) from None
        if kind == "service_account":
            del settings["google_application_credentials"]
            settings["google_service_account_key"] = text
    if settings.get("google_base_url", "").startswith("http://"):
        settings["google_allow_http"] = "true"
    return settings


def _azure_settings(uri: StorageURI, hadoop: HadoopSettings) -> dict[str, str]:
    settings = _environment(_AZURE)
    for part in settings.pop("azure_storage_connection_string", "").split(";"):
        name, _, value = part.partition("=")
        if (ours := _CONNECTION_STRING.get(name)) is not None:
            settings.setdefault(ours, value)
    if uri.user:
        account, _, domain = uri.host.partition(".")
        settings["azure_storage_account_name"] = account
        if domain.endswith("fabric.microsoft.com"):
            settings["azure_use_fabric_endpoint"] = "true"
        elif domain and not domain.endswith("core.windows.net"):
            settings.setdefault(
                "azure_storage_endpoint", f"https://{account}.{domain.replace('dfs.', 'blob.', 1)}"
            )
    key = f"fs.azure.account.key.{settings.get('azure_storage_account_name')}"
    for name, value in hadoop().items():
        if name == key or name.startswith(f"{key}."):
            settings.setdefault("azure_storage_account_key", value)
    emulated = settings.get("azure_storage_use_emulator", "").lower() in ("1", "true")
    if emulated:
        settings.setdefault("azure_storage_account_name", "devstoreaccount1")
    if "azure_storage_account_name" not in settings:
        raise StorageError(
            f"the storage account of {uri.without_secrets()} is unknown: set AZURE_STORAGE_ACCOUNT_NAME, or use "
            "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER"
        )
    if emulated or settings.get("azure_storage_endpoint", "").startswith("http://"):
        settings["azure_allow_http"] = "true"
    return settings


_CONNECTION_STRING = {
    "AccountName": "azure_storage_account_name",
    "AccountKey": "azure_storage_account_key",
    "SharedAccessSignature": "azure_storage_sas_token",
    "BlobEndpoint": "azure_storage_endpoint",
}


# ---------------------------------------------------------------------- files


def _read(path: Path, source: str) -> str:
    try:
        return path.read_text()
    except OSError as exc:
        raise StorageError(f"{path} (from {source}) cannot be read: {exc.strerror}") from exc
