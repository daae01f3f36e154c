//! `harvestfs fs quota`

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::str::FromStr;

use anyhow::{Context, bail};
use clap::Args;
use harvestfs_client::ClientError;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::SetXattrMode;
use harvestfs_protocol::meta::query::Usage;
use harvestfs_protocol::outlook::count;
use harvestfs_protocol::types::FileKind;
use serde_json::{Value, json};

use super::{Files, names};
use crate::units::{self, Size};

const QUOTA_BYTES: &str = "user.harvestfs.quota_bytes";
const QUOTA_FILES: &str = "user.harvestfs.quota_files";

/// `harvestfs fs quota`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs fs quota /photos\n  \
    harvestfs fs quota /photos --bytes 10GiB --files 100000\n  \
    harvestfs fs quota /photos --bytes none")]
pub(super) struct QuotaArgs {
    /// A directory of the cluster.
    path: OsString,
    /// Bytes of files (one copy) that there may be below it, for example 10GiB; `none` removes the
    /// quota. Only root may.
    #[arg(long, value_name = "SIZE|none")]
    bytes: Option<Limit<Size>>,
    /// Files, directories and everything else that there may be below it; `none` removes the quota.
    /// Only root may.
    #[arg(long, value_name = "NUMBER|none")]
    files: Option<Limit<u64>>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A quota to set, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limit<T>(Option<T>);

impl<T: FromStr> FromStr for Limit<T>
where
    T::Err: std::fmt::Display,
{
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(None));
        }
        let parsed = text.parse().map_err(|error: T::Err| error.to_string())?;
        Ok(Self(Some(parsed)))
    }
}

/// What is below a directory and its quotas, for people.
pub(super) fn describe(usage: &Usage) -> String {
    let of = |quota: Option<String>| {
        quota.map_or_else(|| "no quota".into(), |quota| format!("quota {quota}"))
    };
    format!(
        "{} ({}), {} ({})",
        units::human(usage.used_bytes),
        of(usage.quota_bytes.map(units::human)),
        count(usage.used_inodes, "file"),
        of(usage.quota_inodes.map(|files| files.to_string()))
    )
}

/// The same for scripts.
pub(super) fn fields(usage: &Usage) -> Value {
    json!({
        "used_bytes": usage.used_bytes,
        "quota_bytes": usage.quota_bytes,
        "used_files": usage.used_inodes,
        "quota_files": usage.quota_inodes,
    })
}

impl Files {
    pub(super) async fn quota(&self, args: &QuotaArgs) -> anyhow::Result<()> {
        let path = args.path.to_string_lossy();
        let attr = self.find(&args.path).await?;
        if attr.kind != FileKind::Directory {
            bail!("{path} is not a directory; quotas are set on directories");
        }
        if let Some(Limit(bytes)) = args.bytes {
            self.set_quota(attr.ino, QUOTA_BYTES, bytes.map(|size| size.0))
                .await
                .with_context(|| format!("cannot set the quota of bytes of {path}"))?;
        }
        if let Some(Limit(files)) = args.files {
            self.set_quota(attr.ino, QUOTA_FILES, files)
                .await
                .with_context(|| format!("cannot set the quota of files of {path}"))?;
        }
        let usage = self.client.usage(&self.credentials, attr.ino).await?;
        if args.json {
            let mut shown = fields(&usage);
            names::insert(&mut shown, "path", args.path.as_bytes());
            println!("{}", names::json_line(&shown));
            return Ok(());
        }
        println!("{path}: {}", describe(&usage));
        Ok(())
    }

    async fn set_quota(
        &self,
        ino: InodeId,
        name: &str,
        quota: Option<u64>,
    ) -> Result<(), ClientError> {
        let name = name.as_bytes();
        if let Some(quota) = quota {
            let value = quota.to_string();
            return self
                .client
                .setxattr(
                    &self.credentials,
                    ino,
                    name,
                    value.as_bytes(),
                    SetXattrMode::Any,
                )
                .await;
        }
        match self.client.removexattr(&self.credentials, ino, name).await {
            // There was no quota.
            Err(ClientError::Fs(FsError::NoAttribute)) => Ok(()),
            done => done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_number_or_none() {
        assert_eq!("none".parse(), Ok(Limit::<u64>(None)));
        assert_eq!("7".parse(), Ok(Limit(Some(7_u64))));
        assert_eq!("1KiB".parse(), Ok(Limit(Some(Size(1024)))));
        assert!("x".parse::<Limit<u64>>().is_err());
        assert!("".parse::<Limit<Size>>().is_err());
    }
}
