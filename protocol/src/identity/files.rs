//! Certificates and keys in PEM files.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::IdentityError;
use crate::durable;

/// Largest file that is read: certificates and keys have at most a few KiB.
const MAX_PEM_FILE_BYTES: u64 = 64 * 1024;

pub(super) fn read_certificate(path: &Path) -> Result<CertificateDer<'static>, IdentityError> {
    let bytes = read_file(path)?;
    CertificateDer::from_pem_slice(&bytes).map_err(|error| IdentityError::BadFile {
        path: path.to_owned(),
        reason: error.to_string(),
    })
}

pub(super) fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, IdentityError> {
    let bytes = read_file(path)?;
    let mode = fs::metadata(path)
        .map_err(|source| io_error("inspect", path, source))?
        .permissions()
        .mode()
        & 0o777;
    if mode & 0o077 != 0 {
        return Err(IdentityError::KeyExposed {
            path: path.to_owned(),
            mode,
        });
    }
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| IdentityError::BadFile {
        path: path.to_owned(),
        reason: error.to_string(),
    })
}

fn read_file(path: &Path) -> Result<Vec<u8>, IdentityError> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(IdentityError::Missing {
                path: path.to_owned(),
            });
        }
        Err(error) => return Err(io_error("inspect", path, error)),
        Ok(metadata) if metadata.len() > MAX_PEM_FILE_BYTES => {
            return Err(IdentityError::BadFile {
                path: path.to_owned(),
                reason: format!("larger than {MAX_PEM_FILE_BYTES} bytes"),
            });
        }
        Ok(_) => {}
    }
    fs::read(path).map_err(|source| io_error("read", path, source))
}

pub(super) fn pem(label: &str, der: &[u8]) -> String {
    pem::encode(&pem::Pem::new(label, der))
}

pub(super) fn create_dir(dir: &Path) -> Result<(), IdentityError> {
    fs::create_dir_all(dir).map_err(|source| io_error("create", dir, source))
}

/// Writes a file as [`durable::replace_file`] does.
pub(super) fn write_atomically(
    path: &Path,
    content: &[u8],
    mode: u32,
) -> Result<(), IdentityError> {
    durable::replace_file(path, content, mode).map_err(|source| io_error("write", path, source))
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> IdentityError {
    IdentityError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}
