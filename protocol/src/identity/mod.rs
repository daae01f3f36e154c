//! The cluster's certificate authority and the identities it issues.
//!
//! Every part of a cluster (namenode, datanode, client, administrator) owns an [`Identity`]: a key
//! and a certificate that the cluster's [`CertificateAuthority`] signed. The certificate carries the
//! role and the name as one DNS name, `<name>.<role>.harvestfs`, so that TLS itself verifies that the peer that
//! answers is exactly the peer that was dialled.

mod files;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType, SerialNumber,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime};
use serde::{Deserialize, Serialize};

use crate::machine;
use files::{create_dir, pem, read_certificate, read_key, write_atomically};

/// File name of the authority's certificate, which every part needs.
pub const CA_CERT_FILE: &str = "ca.pem";
/// File name of the authority's key, which only the machine that issues identities needs.
pub const CA_KEY_FILE: &str = "ca.key";
/// File name of an identity's certificate.
pub const CERT_FILE: &str = "cert.pem";
/// File name of an identity's key.
pub const KEY_FILE: &str = "key.pem";

/// Longest name of a part in bytes: the longest label that a DNS name may have.
pub const MAX_NAME_BYTES: usize = 63;

/// Last label of every name in a certificate.
const DOMAIN: &str = "harvestfs";

/// Validity of an authority: longer than any cluster is expected to run without renewing it.
const CA_VALIDITY: Duration = Duration::from_secs(20 * 365 * 24 * 3600);

/// Certificates are valid from an hour ago, so that small differences between clocks do not invalidate them.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// Later than the expiry of any certificate, whose dates end with the year 9999.
const END_OF_TIME_UNIX_S: u64 = 300_000_000_000;

/// The kind of a part of the cluster, which decides what it may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Serves metadata.
    Namenode,
    /// Stores blocks.
    Datanode,
    /// Reads and writes files.
    Client,
    /// Operates the cluster.
    Admin,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 4] = [Role::Namenode, Role::Datanode, Role::Client, Role::Admin];

    /// The role as written in certificates, configuration and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Namenode => "namenode",
            Role::Datanode => "datanode",
            Role::Client => "client",
            Role::Admin => "admin",
        }
    }

    /// Whether parts of this role accept connections (their certificates allow it).
    pub fn listens(self) -> bool {
        matches!(self, Role::Namenode | Role::Datanode)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Role::ALL
            .into_iter()
            .find(|role| role.as_str() == text)
            .ok_or_else(|| IdentityError::UnknownRole {
                role: text.to_owned(),
            })
    }
}

/// The name of one part of the cluster, as proven by its certificate.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Peer {
    /// Its role.
    pub role: Role,
    /// Its name, unique within the role: 1 to 63 of `a-z`, `0-9` and `-`, not starting or ending with `-`.
    pub name: String,
}

impl Peer {
    /// Creates a peer, checking its name.
    ///
    /// # Errors
    /// [`IdentityError::BadName`] if the name cannot be in a certificate.
    pub fn new(role: Role, name: impl Into<String>) -> Result<Self, IdentityError> {
        let name = name.into();
        let valid = (1..=MAX_NAME_BYTES).contains(&name.len())
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            && !name.starts_with('-')
            && !name.ends_with('-');
        if valid {
            Ok(Self { role, name })
        } else {
            Err(IdentityError::BadName { name })
        }
    }

    /// This peer's DNS name in its certificate.
    pub fn dns_name(&self) -> String {
        format!("{}.{}.{DOMAIN}", self.name, self.role)
    }

    /// Parses the DNS name in a certificate.
    ///
    /// # Errors
    /// Any name that [`Peer::dns_name`] cannot have produced is refused.
    pub fn from_dns_name(dns_name: &str) -> Result<Self, IdentityError> {
        let not_ours = || IdentityError::ForeignCertificate {
            dns_name: dns_name.to_owned(),
        };
        let mut labels = dns_name.split('.');
        let (Some(name), Some(role), Some(DOMAIN), None) =
            (labels.next(), labels.next(), labels.next(), labels.next())
        else {
            return Err(not_ours());
        };
        Self::new(role.parse()?, name)
    }

    /// Returns the peer that a certificate names. The certificate must have been verified before.
    ///
    /// # Errors
    /// [`IdentityError::ForeignCertificate`] unless the certificate carries exactly one name, in the
    /// form that [`CertificateAuthority::issue`] gives it.
    pub fn from_certificate(certificate: &CertificateDer<'_>) -> Result<Self, IdentityError> {
        let foreign = |why: String| IdentityError::ForeignCertificate { dns_name: why };
        let parsed = webpki::EndEntityCert::try_from(certificate)
            .map_err(|error| foreign(error.to_string()))?;
        let mut names = parsed.valid_dns_names();
        match (names.next(), names.next()) {
            (Some(only), None) => Self::from_dns_name(only),
            (None, _) => Err(foreign("no DNS name".to_owned())),
            (Some(_), Some(_)) => Err(foreign("several DNS names".to_owned())),
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role, self.name)
    }
}

/// Errors of an authority or an identity, with the remedy in the message.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The name cannot be in a certificate.
    #[error(
        "bad name {name:?}: use 1 to {MAX_NAME_BYTES} of a-z, 0-9 and '-', not starting or ending with '-'"
    )]
    BadName {
        /// The name as given.
        name: String,
    },
    /// The role is none of [`Role::ALL`].
    #[error("unknown role {role:?}: use namenode, datanode, client or admin")]
    UnknownRole {
        /// The role as given.
        role: String,
    },
    /// The certificate does not name a part of a HarvestFS cluster.
    #[error("the certificate does not name a part of a HarvestFS cluster ({dns_name})")]
    ForeignCertificate {
        /// The name found, or what is wrong with it.
        dns_name: String,
    },
    /// A file is missing.
    #[error("{} is missing: run `harvestfs init`, or copy the identity that it issued", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// An authority already exists.
    #[error("{} already exists: an authority is never replaced, use another directory", path.display())]
    AlreadyExists {
        /// The file.
        path: PathBuf,
    },
    /// A file cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A key can be read by other users of the machine.
    #[error("{} can be read by others (mode {mode:03o}): run `chmod 600` on it", path.display())]
    KeyExposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A file is not the PEM file that it should be.
    #[error("{} is not a valid PEM file: {reason}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The key and the certificate are not a pair.
    #[error("{} does not belong to {}: issue the identity again", key.display(), certificate.display())]
    KeyMismatch {
        /// The file of the key.
        key: PathBuf,
        /// The file of the certificate.
        certificate: PathBuf,
    },
    /// The certificate has expired, or was not issued by this authority.
    #[error("{} is not accepted: {reason}: issue the identity again", path.display())]
    NotAccepted {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The certificate could not be created.
    #[error("cannot make a certificate: {0}")]
    Issue(#[from] rcgen::Error),
}

/// The cluster's certificate authority: its holder decides which parts belong to the cluster.
pub struct CertificateAuthority {
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl CertificateAuthority {
    /// Creates a new authority in `dir` (created if absent): `ca.pem`, and `ca.key`, which only the owner may
    /// read.
    ///
    /// # Errors
    /// [`IdentityError::AlreadyExists`] if `ca.pem` exists; any failure to write.
    pub fn create(dir: &Path) -> Result<Self, IdentityError> {
        create_dir(dir)?;
        let certificate_path = dir.join(CA_CERT_FILE);
        if certificate_path.exists() {
            return Err(IdentityError::AlreadyExists {
                path: certificate_path,
            });
        }
        let (authority, certificate_pem) = Self::generate(KeyPair::generate()?)?;
        let key_pem = authority.issuer.key().serialize_pem();
        // The certificate is written last: without it, the authority does not exist yet.
        write_atomically(&dir.join(CA_KEY_FILE), key_pem.as_bytes(), 0o600)?;
        write_atomically(&certificate_path, certificate_pem.as_bytes(), 0o644)?;
        Ok(authority)
    }

    /// Creates a new authority that is not written to disk, for tests and simulations.
    ///
    /// # Errors
    /// [`IdentityError::Issue`] if no key can be generated.
    pub fn in_memory() -> Result<Self, IdentityError> {
        Ok(Self::generate(KeyPair::generate()?)?.0)
    }

    /// Creates a new authority that is not written to disk, for simulations: its signatures, and those of the
    /// identities that it issues, all have the same length, so that the same datagrams are sent each time.
    ///
    /// # Errors
    /// [`IdentityError::Issue`] if no key can be generated.
    pub fn for_simulation() -> Result<Self, IdentityError> {
        let key = KeyPair::generate_for(&rcgen::PKCS_ED25519)?;
        Ok(Self::generate(key)?.0)
    }

    /// Loads the authority that [`CertificateAuthority::create`] wrote to `dir`.
    ///
    /// # Errors
    /// A typed error that names the file and what to do about it.
    pub fn load(dir: &Path) -> Result<Self, IdentityError> {
        let certificate_path = dir.join(CA_CERT_FILE);
        let key_path = dir.join(CA_KEY_FILE);
        let certificate = read_certificate(&certificate_path)?;
        let key_der = read_key(&key_path)?;
        let key = KeyPair::try_from(&key_der).map_err(|error| IdentityError::BadFile {
            path: key_path.clone(),
            reason: error.to_string(),
        })?;
        check_key_matches(&certificate, &key_der, &certificate_path, &key_path)?;
        Ok(Self {
            certificate,
            issuer: Issuer::new(authority_params(&key), key),
        })
    }

    /// Issues an identity that is valid from now on for `validity`.
    ///
    /// # Errors
    /// [`IdentityError::BadName`], or [`IdentityError::Issue`] if signing fails.
    pub fn issue(
        &self,
        role: Role,
        name: &str,
        validity: Duration,
    ) -> Result<Identity, IdentityError> {
        let peer = Peer::new(role, name)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = common_name(&peer.to_string());
        params.subject_alt_names = vec![SanType::DnsName(peer.dns_name().try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if role.listens() {
            params
                .extended_key_usages
                .push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        set_validity(&mut params, validity);
        params.serial_number = Some(serial_number());
        let key = KeyPair::generate_for(self.issuer.key().algorithm())?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(Identity {
            peer,
            certificate: certificate.der().clone(),
            key: Arc::new(PrivatePkcs8KeyDer::from(key.serialize_der()).into()),
            authority: self.certificate.clone(),
        })
    }

    /// The authority's certificate.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    fn generate(key: KeyPair) -> Result<(Self, String), IdentityError> {
        let params = authority_params(&key);
        let certificate = params.self_signed(&key)?;
        let authority = Self {
            certificate: certificate.der().clone(),
            issuer: Issuer::new(params, key),
        };
        Ok((authority, certificate.pem()))
    }
}

impl fmt::Debug for CertificateAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CertificateAuthority")
            .finish_non_exhaustive()
    }
}

/// A key and a certificate of one part of the cluster, with the authority that the part trusts.
#[derive(Clone)]
pub struct Identity {
    peer: Peer,
    certificate: CertificateDer<'static>,
    key: Arc<PrivateKeyDer<'static>>,
    authority: CertificateDer<'static>,
}

impl Identity {
    /// Loads `cert.pem`, `key.pem` and `ca.pem` from `dir` and checks that they match.
    ///
    /// # Errors
    /// A typed error that names the file and what to do about it: a file is missing or damaged, the
    /// key is readable by others or belongs to another certificate, the certificate has expired or is
    /// from another authority.
    pub fn load(dir: &Path) -> Result<Self, IdentityError> {
        let certificate_path = dir.join(CERT_FILE);
        let key_path = dir.join(KEY_FILE);
        let authority = read_certificate(&dir.join(CA_CERT_FILE))?;
        let certificate = read_certificate(&certificate_path)?;
        let key = read_key(&key_path)?;
        check_key_matches(&certificate, &key, &certificate_path, &key_path)?;
        check_issued_by(&certificate, &authority, UnixTime::now()).map_err(|error| {
            IdentityError::NotAccepted {
                path: certificate_path,
                reason: error.to_string(),
            }
        })?;
        Ok(Self {
            peer: Peer::from_certificate(&certificate)?,
            certificate,
            key: Arc::new(key),
            authority,
        })
    }

    /// Writes the identity to `dir` (created if absent), each file atomically, the key readable only by the
    /// owner. The certificate is written last: [`Identity::load`] detects a crash in between, and saving again
    /// repairs it.
    ///
    /// # Errors
    /// [`IdentityError::Io`].
    pub fn save(&self, dir: &Path) -> Result<(), IdentityError> {
        create_dir(dir)?;
        let key = pem("PRIVATE KEY", self.key.secret_der());
        write_atomically(&dir.join(KEY_FILE), key.as_bytes(), 0o600)?;
        for (file, der) in [
            (CA_CERT_FILE, &self.authority),
            (CERT_FILE, &self.certificate),
        ] {
            write_atomically(
                &dir.join(file),
                pem("CERTIFICATE", der.as_ref()).as_bytes(),
                0o644,
            )?;
        }
        Ok(())
    }

    /// The peer that this identity names.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The certificate of this identity.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// Returns the end of the certificate's validity, in seconds since 1970.
    ///
    /// # Errors
    /// [`IdentityError::BadFile`] if the certificate cannot be parsed.
    pub fn expires_unix_s(&self) -> Result<u64, IdentityError> {
        expires_unix_s(&self.certificate, &self.authority, CERT_FILE)
    }

    /// Returns the end of the validity of the authority's certificate, in seconds since 1970.
    ///
    /// # Errors
    /// As [`Identity::expires_unix_s`].
    pub fn authority_expires_unix_s(&self) -> Result<u64, IdentityError> {
        expires_unix_s(&self.authority, &self.authority, CA_CERT_FILE)
    }

    /// The certificate of the authority that this identity trusts.
    pub fn authority(&self) -> &CertificateDer<'static> {
        &self.authority
    }

    /// Identifies the cluster: the first 16 hexadecimal digits of the SHA-256 of the authority's certificate.
    #[must_use]
    pub fn cluster(&self) -> String {
        fingerprint(&self.authority)
    }

    /// A copy of the private key, for TLS. It is this identity's alone.
    pub fn clone_key(&self) -> PrivateKeyDer<'static> {
        self.key.clone_key()
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

/// Returns the parameters of an authority's certificate. The name in them is derived from its key alone, so
/// that a loaded authority issues under the same name without parsing its certificate.
fn authority_params(key: &KeyPair) -> CertificateParams {
    let fingerprint = fingerprint(key.public_key_raw());
    let mut params = CertificateParams::default();
    params.distinguished_name = common_name(&format!("HarvestFS authority {fingerprint}"));
    params.serial_number = Some(serial_number());
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    set_validity(&mut params, CA_VALIDITY);
    params
}

fn fingerprint(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    let start = &digest.as_ref()[..8];
    start.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn common_name(name: &str) -> DistinguishedName {
    let mut distinguished_name = DistinguishedName::new();
    distinguished_name.push(DnType::CommonName, name);
    distinguished_name
}

/// A random number whose encoding always has the same length (RFC 5280, 4.1.2.2).
fn serial_number() -> SerialNumber {
    let mut bytes = machine::random::<[u8; 16]>();
    bytes[0] = bytes[0] & 0x3f | 0x40;
    SerialNumber::from_slice(&bytes)
}

fn set_validity(params: &mut CertificateParams, validity: Duration) {
    let now = SystemTime::now();
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + validity.min(CA_VALIDITY)).into();
}

fn check_key_matches(
    certificate: &CertificateDer<'static>,
    key: &PrivateKeyDer<'static>,
    certificate_path: &Path,
    key_path: &Path,
) -> Result<(), IdentityError> {
    let provider = rustls::crypto::ring::default_provider();
    match rustls::sign::CertifiedKey::from_der(
        vec![certificate.clone()],
        key.clone_key(),
        &provider,
    ) {
        Ok(_) => Ok(()),
        Err(rustls::Error::InconsistentKeys(_)) => Err(IdentityError::KeyMismatch {
            key: key_path.to_owned(),
            certificate: certificate_path.to_owned(),
        }),
        Err(error) => Err(IdentityError::BadFile {
            path: key_path.to_owned(),
            reason: error.to_string(),
        }),
    }
}

/// Returns the end of a certificate's validity, in seconds since 1970.
fn expires_unix_s(
    certificate: &CertificateDer<'_>,
    authority: &CertificateDer<'_>,
    file: &str,
) -> Result<u64, IdentityError> {
    // The verifier serves as the parser here: asked about the end of time, it reports since when the
    // certificate has been expired. It checks nothing else before that.
    let end_of_time = UnixTime::since_unix_epoch(Duration::from_secs(END_OF_TIME_UNIX_S));
    match check_issued_by(certificate, authority, end_of_time) {
        Err(webpki::Error::CertExpired { not_after, .. }) => Ok(not_after.as_secs()),
        other => Err(IdentityError::BadFile {
            path: file.into(),
            reason: format!("its validity has no end: {other:?}"),
        }),
    }
}

fn check_issued_by(
    certificate: &CertificateDer<'_>,
    authority: &CertificateDer<'_>,
    now: UnixTime,
) -> Result<(), webpki::Error> {
    let anchor = webpki::anchor_from_trusted_cert(authority)?;
    let algorithms = rustls::crypto::ring::default_provider().signature_verification_algorithms;
    webpki::EndEntityCert::try_from(certificate)?
        .verify_for_usage(
            algorithms.all,
            &[anchor],
            &[],
            now,
            webpki::KeyUsage::client_auth(),
            None,
            None,
        )
        .map(|_| ())
}

#[cfg(test)]
mod tests;
