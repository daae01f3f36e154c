use super::*;

mod kernel;
mod kernel_requests;

const MS: Duration = Duration::from_millis(1);
const THREAD: u32 = 7;
const OTHER: u32 = 8;
const OPENER: Waiter = Waiter {
    thread: THREAD,
    locks_inode: false,
};

fn read(pages: &Pages, range: Range<u64>) -> PageRead {
    pages.read(range, THREAD)
}

/// The largest size that the kernel believes.
fn believed(pages: &Pages) -> u64 {
    pages.read(0..1, THREAD).believed_bytes
}

fn refuse(pages: &Pages, range: Range<u64>, end: u64, now: Instant) {
    let read = read(pages, range);
    let verdict = pages.short_read(&read, end, now);
    assert_eq!(verdict, ShortRead::FenceAndRefuse);
    pages.refused(&read, end, now);
}

fn open(size_bytes: u64) -> Pages {
    let pages = Pages::new(size_bytes);
    pages.opened();
    pages
}

#[test]
fn a_larger_size_waits_for_pages_to_be_dropped() {
    let now = Instant::now();
    let pages = open(10);
    assert!(pages.may_tell(11, now), "no page is there");
    pages.tell(10);
    assert!(pages.may_tell(10, now) && pages.may_tell(3, now));
    assert!(!pages.may_tell(11, now));
    assert!(pages.needs_drop(11));

    assert!(pages.want_drop());
    assert!(!pages.want_drop(), "it is wanted already");
    assert!(!pages.needs_drop(11) && !pages.may_tell(10, now));
    assert!(pages.begin_drop(now).is_some());
    assert!(!pages.want_drop(), "the task that drops them goes on");
    assert!(pages.end_drop(), "some became old meanwhile");
    assert!(!pages.may_tell(10, now));
    assert!(pages.begin_drop(now).is_some());
    assert!(!pages.end_drop());
    assert!(pages.may_tell(11, now));
}

#[test]
fn a_page_that_is_read_while_pages_are_dropped_may_end_with_zeros() {
    let now = Instant::now();
    let pages = open(10);
    assert!(pages.want_drop() && pages.begin_drop(now).is_some());
    let read = read(&pages, 0..16);
    assert_eq!(pages.short_read(&read, 12, now), ShortRead::Answer);
    assert!(!pages.end_drop());
    assert!(pages.may_tell(12, now));
    assert!(pages.needs_drop(13));
}

#[test]
fn a_file_that_is_cut_while_pages_are_dropped_ends_with_zeros() {
    let now = Instant::now();
    let pages = open(10);
    assert!(pages.want_drop() && pages.begin_drop(now).is_some());
    pages.resize(5, OPENER, now);
    pages.heard_from(THREAD);
    assert!(!pages.end_drop());
    assert!(pages.may_tell(5, now));
    assert!(pages.needs_drop(6));
}

#[test]
fn what_this_mount_writes_needs_no_drop() {
    let now = Instant::now();
    let pages = open(0);
    pages.tell(0);
    assert!(pages.write(4_096, CachedWrite::Kept, THREAD, now));
    assert!(pages.may_tell(4_096, now));
    pages.resize(100, OPENER, now);
    assert_eq!(pages.growth_max(), 100);
    assert_eq!(believed(&pages), 4_096, "until the thread has run");
    pages.heard_from(OTHER);
    assert_eq!(believed(&pages), 4_096);
    pages.heard_from(THREAD);
    assert_eq!(believed(&pages), 100);
}

#[test]
fn an_answer_is_not_in_flight_for_ever() {
    let now = Instant::now();
    let pages = open(10);
    assert!(pages.write(5, CachedWrite::Kept, NO_THREAD, now));
    let read = read(&pages, 0..16);
    assert_eq!(pages.short_read(&read, 4, now), ShortRead::Wait);
    let later = now + IN_FLIGHT_MAX;
    assert_eq!(pages.short_read(&read, 4, later), ShortRead::FenceAndRefuse);
}

#[test]
fn more_threads_than_are_told_apart_count_as_one() {
    let now = Instant::now();
    let pages = open(10);
    for thread in 1..=2 * IN_FLIGHT_ANSWERS_MAX as u32 {
        let opener = Waiter { thread, ..OPENER };
        pages.impose(10, opener, now);
    }
    for thread in 1..=2 * IN_FLIGHT_ANSWERS_MAX as u32 {
        pages.heard_from(thread);
    }
    let read = read(&pages, 0..16);
    assert_eq!(pages.short_read(&read, 4, now), ShortRead::Wait);
}

#[test]
fn the_end_is_no_early_end() {
    let now = Instant::now();
    let pages = open(10);
    let read = read(&pages, 0..16);
    assert_eq!(pages.short_read(&read, 10, now), ShortRead::Answer);
    assert!(pages.write(20, CachedWrite::Kept, THREAD, now));
    assert_eq!(
        pages.short_read(&read, 10, now),
        ShortRead::Answer,
        "it was written after the kernel asked: a hole is zeros"
    );
    assert_eq!(believed(&pages), 20);
}

/// However long a request takes to arrive, and however long ago the file was disturbed last.
#[test]
fn an_early_end_is_answered_only_when_it_is_asked_again() {
    let start = Instant::now();
    let pages = open(10);
    let now = start + Duration::from_secs(3_600);
    refuse(&pages, 0..16, 4, now);
    assert!(!pages.may_tell(4, now), "it is left undisturbed");
    assert!(!pages.begin_notice(now));

    let elsewhere = read(&pages, 16..32);
    assert_eq!(
        pages.short_read(&elsewhere, 4, now),
        ShortRead::Refuse,
        "it may have been asked before"
    );
    let again = read(&pages, 8..16);
    assert_eq!(pages.short_read(&again, 4, now + MS), ShortRead::Answer);
    assert_eq!(pages.growth_max(), 4);
    assert!(!pages.begin_notice(now + MS), "the answer is in flight");
    assert!(!pages.write(2, CachedWrite::Kept, OTHER, now + MS));
    pages.heard_from(THREAD);
    assert!(pages.begin_notice(now + MS));
}

#[test]
fn a_disturbance_after_the_refusal_needs_another_one() {
    let now = Instant::now();
    let pages = open(10);
    refuse(&pages, 0..16, 4, now);
    pages.tell(3);
    refuse(&pages, 0..16, 4, now);
    assert!(pages.write(2, CachedWrite::Kept, OTHER, now));
    pages.heard_from(OTHER);
    refuse(&pages, 0..16, 4, now);
    pages.force_notice();
    let again = read(&pages, 0..16);
    assert_eq!(pages.short_read(&again, 4, now), ShortRead::Wait);
    pages.end_notice();
    refuse(&pages, 0..16, 4, now);
    assert_eq!(pages.short_read(&again, 4, now), ShortRead::Answer);
}

#[test]
fn pages_are_dropped_before_a_read_of_them_is_remembered_as_refused() {
    let now = Instant::now();
    let pages = open(10);
    assert!(pages.want_drop());
    let read = read(&pages, 0..16);
    assert_eq!(pages.short_read(&read, 4, now), ShortRead::Wait);
    assert!(pages.begin_drop(now).is_some());
    for _ in 0..2 {
        assert_eq!(
            pages.short_read(&read, 4, now),
            ShortRead::Refuse,
            "the kernel may wait for it"
        );
    }
    assert!(!pages.end_drop());
    refuse(&pages, 0..16, 4, now);
}

#[test]
fn the_quiet_ends_by_itself() {
    let now = Instant::now();
    let pages = open(10);
    refuse(&pages, 0..16, 4, now);
    assert!(pages.want_drop());
    assert!(pages.begin_drop(now).is_none());
    assert!(pages.begin_drop(now + QUIET_MAX).is_some());
}

#[test]
fn a_file_that_was_never_opened_has_no_pages_to_drop() {
    let pages = Pages::new(10);
    assert!(!pages.want_drop());
    assert!(!pages.are_old());
    pages.opened();
    assert!(pages.want_drop());
    assert!(pages.are_old());
}
