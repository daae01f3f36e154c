use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::*;

const DAY: Duration = Duration::from_secs(24 * 3600);

fn saved_identity() -> (tempfile::TempDir, Identity) {
    let dir = tempfile::tempdir().unwrap();
    let authority = CertificateAuthority::in_memory().unwrap();
    let identity = authority.issue(Role::Datanode, "dn-1", DAY).unwrap();
    identity.save(dir.path()).unwrap();
    (dir, identity)
}

fn mode(path: PathBuf) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn an_authority_is_created_once_and_loaded_again() {
    let dir = tempfile::tempdir().unwrap();
    let created = CertificateAuthority::create(dir.path()).unwrap();
    assert_eq!(mode(dir.path().join(CA_KEY_FILE)), 0o600);
    let loaded = CertificateAuthority::load(dir.path()).unwrap();
    assert_eq!(loaded.certificate(), created.certificate());
    let identity = loaded.issue(Role::Client, "mount", DAY).unwrap();
    check_issued_by(
        identity.certificate(),
        created.certificate(),
        UnixTime::now(),
    )
    .unwrap();
    assert!(matches!(
        CertificateAuthority::create(dir.path()),
        Err(IdentityError::AlreadyExists { .. })
    ));
    let leftovers = fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(leftovers, 2, "only ca.pem and ca.key");
}

#[test]
fn an_identity_is_saved_and_loaded() {
    let (dir, identity) = saved_identity();
    assert_eq!(mode(dir.path().join(KEY_FILE)), 0o600);
    let loaded = Identity::load(dir.path()).unwrap();
    assert_eq!(loaded.peer(), &Peer::new(Role::Datanode, "dn-1").unwrap());
    assert_eq!(loaded.certificate(), identity.certificate());
    assert_eq!(loaded.clone_key(), identity.clone_key());
    identity.save(dir.path()).unwrap();
    Identity::load(dir.path()).unwrap();
}

#[test]
fn every_missing_or_damaged_file_is_named() {
    for file in [CERT_FILE, KEY_FILE, CA_CERT_FILE] {
        let (dir, _) = saved_identity();
        let path = dir.path().join(file);
        for content in [&b"no pem"[..], b"", &[0xff; 100]] {
            fs::write(&path, content).unwrap();
            let error = Identity::load(dir.path()).unwrap_err();
            assert!(
                matches!(&error, IdentityError::BadFile { path: named, .. } if *named == path),
                "{error}"
            );
        }
        fs::write(&path, vec![b'x'; 1 << 20]).unwrap();
        let error = Identity::load(dir.path()).unwrap_err();
        assert!(matches!(error, IdentityError::BadFile { .. }), "{error}");
        fs::remove_file(&path).unwrap();
        let error = Identity::load(dir.path()).unwrap_err();
        assert!(matches!(&error, IdentityError::Missing { path: named } if *named == path));
        assert!(error.to_string().contains(file), "{error}");
    }
}

#[test]
fn a_certificate_with_damaged_content_is_refused() {
    let (dir, _) = saved_identity();
    let path = dir.path().join(CERT_FILE);
    fs::write(&path, pem("CERTIFICATE", &[1, 2, 3])).unwrap();
    assert!(Identity::load(dir.path()).is_err());
}

#[test]
fn an_exposed_key_is_refused() {
    let (dir, _) = saved_identity();
    let path = dir.path().join(KEY_FILE);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let error = Identity::load(dir.path()).unwrap_err();
    assert!(matches!(
        error,
        IdentityError::KeyExposed { mode: 0o640, .. }
    ));
    assert!(error.to_string().contains("chmod 600"), "{error}");
}

#[test]
fn a_key_of_another_certificate_is_refused() {
    let (dir, _) = saved_identity();
    let (other, _) = saved_identity();
    fs::copy(other.path().join(KEY_FILE), dir.path().join(KEY_FILE)).unwrap();
    let error = Identity::load(dir.path()).unwrap_err();
    assert!(
        matches!(error, IdentityError::KeyMismatch { .. }),
        "{error}"
    );
}

#[test]
fn an_identity_of_another_authority_or_over_its_time_is_refused() {
    let (dir, _) = saved_identity();
    let (other, _) = saved_identity();
    fs::copy(
        other.path().join(CA_CERT_FILE),
        dir.path().join(CA_CERT_FILE),
    )
    .unwrap();
    let error = Identity::load(dir.path()).unwrap_err();
    assert!(
        matches!(error, IdentityError::NotAccepted { .. }),
        "{error}"
    );

    let authority = CertificateAuthority::in_memory().unwrap();
    let expired = authority.issue(Role::Client, "c", Duration::ZERO).unwrap();
    let dir = tempfile::tempdir().unwrap();
    expired.save(dir.path()).unwrap();
    // Certificates count whole seconds: wait until the next one, without relying on a sleep.
    let error = loop {
        if let Err(error) = Identity::load(dir.path()) {
            break error;
        }
        std::thread::yield_now();
    };
    assert!(
        matches!(error, IdentityError::NotAccepted { .. }),
        "{error}"
    );
}

#[test]
fn names_that_cannot_stand_in_a_certificate_are_refused() {
    let authority = CertificateAuthority::in_memory().unwrap();
    let long = "x".repeat(64);
    for name in ["", "A", "a.b", "a b", "-a", "a-", "ä", "a/b", "*", &long] {
        let error = authority.issue(Role::Client, name, DAY).unwrap_err();
        assert!(matches!(error, IdentityError::BadName { .. }), "{name}");
    }
    authority.issue(Role::Client, &long[..63], DAY).unwrap();
}

#[test]
fn peers_and_their_names_convert_both_ways() {
    for role in Role::ALL {
        let peer = Peer::new(role, "a-1").unwrap();
        assert_eq!(Peer::from_dns_name(&peer.dns_name()).unwrap(), peer);
        assert_eq!(role.as_str().parse::<Role>().unwrap(), role);
    }
    for foreign in [
        "",
        "harvestfs",
        "client.harvestfs",
        "a.client.example",
        "a.king.harvestfs",
        "a.b.client.harvestfs",
        ".client.harvestfs",
        "a.client.harvestfs.",
    ] {
        assert!(Peer::from_dns_name(foreign).is_err(), "{foreign}");
    }
}

impl CertificateAuthority {
    /// A certificate for any DNS name, with the key of `identity`.
    pub(crate) fn certify_for_test(
        &self,
        dns_name: &str,
        identity: &Identity,
    ) -> CertificateDer<'static> {
        let key = KeyPair::try_from(&identity.clone_key()).unwrap();
        let mut params = CertificateParams::new(vec![dns_name.to_owned()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        certificate.der().clone()
    }
}

impl Identity {
    /// The same with other certificates, where given.
    pub(crate) fn with_parts(
        mut self,
        certificate: Option<CertificateDer<'static>>,
        authority: Option<CertificateDer<'static>>,
    ) -> Self {
        self.certificate = certificate.unwrap_or(self.certificate);
        self.authority = authority.unwrap_or(self.authority);
        self
    }
}

#[test]
fn an_identity_knows_when_it_expires() {
    let authority = CertificateAuthority::in_memory().unwrap();
    let validity = Duration::from_secs(1_000_000);
    let identity = authority.issue(Role::Client, "c", validity).unwrap();
    let now_s = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let left_s = identity.expires_unix_s().unwrap() - now_s;
    assert!((900_000..=1_000_000).contains(&left_s), "{left_s}");
    let left_s = identity.authority_expires_unix_s().unwrap() - now_s;
    let wanted_s = CA_VALIDITY.as_secs();
    assert!(
        (wanted_s - 100_000..=wanted_s).contains(&left_s),
        "{left_s}"
    );
}
