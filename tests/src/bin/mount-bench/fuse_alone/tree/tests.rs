use super::*;

const ROOT: u64 = INodeNo::ROOT.0;

fn tree_with_file() -> (Tree, u64) {
    let mut tree = Tree::new(0, 0);
    let file = create(&mut tree, ROOT, "file", Content::empty_file());
    (tree, file)
}

fn create(tree: &mut Tree, parent: u64, name: &str, content: Content) -> u64 {
    let attr = tree.create(parent, OsStr::new(name), content, 0o644, 0, 0);
    attr.unwrap().ino.0
}

fn content(tree: &Tree, ino: u64, offset: u64, size: usize) -> Vec<u8> {
    let pieces = tree.read(ino, offset, size).unwrap();
    let bytes: Vec<&[u8]> = pieces.iter().map(Piece::bytes).collect();
    bytes.concat()
}

fn names(tree: &mut Tree, place: u64, most: usize) -> Vec<(u64, String)> {
    let mut names = Vec::new();
    tree.list(ROOT, place, true, |place, name, _| {
        let full = names.len() == most;
        if !full {
            names.push((place, name.to_string_lossy().into_owned()));
        }
        full
    })
    .unwrap();
    names
}

#[test]
fn content_over_several_chunks_with_holes_is_read_back() {
    let (mut tree, file) = tree_with_file();
    let mut expected = vec![0; 4 * CHUNK_BYTES + 7];
    for (offset, length, byte) in [
        (3 * CHUNK_BYTES - 5, CHUNK_BYTES + 12, 1),
        (10, 20, 2),
        (3 * CHUNK_BYTES - 9, 6, 3),
        (4 * CHUNK_BYTES, 7, 4),
    ] {
        tree.write(file, offset as u64, &vec![byte; length])
            .unwrap();
        expected[offset..offset + length].fill(byte);
    }
    assert_eq!(tree.attr(file).unwrap().size, expected.len() as u64);
    assert!(content(&tree, file, 0, usize::MAX) == expected);
    assert_eq!(content(&tree, file, expected.len() as u64 - 3, 9), [4; 3]);
    assert!(content(&tree, file, u64::MAX, 9).is_empty());
    assert_eq!(tree.write(file, u64::MAX, &[0, 0]), Err(Errno::EFBIG));

    for size_bytes in [3 * CHUNK_BYTES - 7, CHUNK_BYTES, 5 * CHUNK_BYTES] {
        let changes = Changes {
            size_bytes: Some(size_bytes as u64),
            ..Changes::default()
        };
        tree.change(file, &changes).unwrap();
        expected.resize(size_bytes, 0);
        assert!(content(&tree, file, 0, usize::MAX) == expected);
    }
}

#[test]
fn a_removed_file_lives_until_the_kernel_forgets_it() {
    let (mut tree, file) = tree_with_file();
    tree.write(file, 0, b"text").unwrap();
    tree.remove(ROOT, OsStr::new("file"), false).unwrap();
    assert_eq!(tree.lookup(ROOT, OsStr::new("file")), Err(Errno::ENOENT));
    assert_eq!(content(&tree, file, 0, 9), b"text");
    assert!(tree.forget(file, 1).is_some());
    assert_eq!(tree.attr(file), Err(Errno::ESTALE));
}

#[test]
fn a_rename_replaces_only_what_it_may() {
    let (mut tree, file) = tree_with_file();
    let [a, b] = ["a", "b"].map(|name| {
        let content = Content::empty_directory(ROOT);
        create(&mut tree, ROOT, name, content)
    });
    let other = create(&mut tree, b, "other", Content::empty_file());
    let mut rename = |from: (u64, &str), to: (u64, &str), no_replace| {
        let (name, new_name) = (OsStr::new(from.1), OsStr::new(to.1));
        tree.rename(from.0, name, to.0, new_name, no_replace)
    };
    assert_eq!(
        rename((ROOT, "a"), (ROOT, "b"), false),
        Err(Errno::ENOTEMPTY)
    );
    assert_eq!(
        rename((ROOT, "file"), (ROOT, "a"), false),
        Err(Errno::EISDIR)
    );
    assert_eq!(
        rename((ROOT, "a"), (ROOT, "file"), false),
        Err(Errno::ENOTDIR)
    );
    assert_eq!(
        rename((ROOT, "file"), (b, "other"), true),
        Err(Errno::EEXIST)
    );
    rename((ROOT, "file"), (b, "other"), false).unwrap();
    rename((ROOT, "b"), (a, "c"), false).unwrap();

    assert_eq!(tree.attr(other).unwrap().nlink, 0);
    assert_eq!(tree.lookup(a, OsStr::new("c")).unwrap().ino.0, b);
    assert_eq!(tree.lookup(b, OsStr::new("other")).unwrap().ino.0, file);
    assert_eq!(tree.directory(b).unwrap().parent, a);
    let links = [ROOT, a, b].map(|ino| tree.attr(ino).unwrap().nlink);
    assert_eq!(links, [3, 3, 2]);
    assert_eq!(tree.remove(a, OsStr::new("c"), true), Err(Errno::ENOTEMPTY));
}

#[test]
fn a_directory_is_read_on_where_it_was_while_entries_are_removed() {
    let (mut tree, file) = tree_with_file();
    create(&mut tree, ROOT, "second", Content::empty_file());
    let first = names(&mut tree, 0, 3);
    assert_eq!(first.last().unwrap().1, "file");
    tree.remove(ROOT, OsStr::new("file"), false).unwrap();
    let (place, _) = first.last().unwrap();
    assert_eq!(names(&mut tree, *place, 9)[0].1, "second");
    assert_eq!(names(&mut tree, 0, 9).len(), 3);
    assert!(names(&mut tree, u64::MAX, 9).is_empty());
    // Created and listed once.
    assert!(tree.forget(file, 1).is_none());
    assert!(tree.forget(file, 1).is_some());
}
