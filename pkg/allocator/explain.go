package allocator

import "iter"

// Explain folds the failures of all nodes into one line for a person: for each request how many devices
// matched, were held, filtered by which selector, or tainted, then problems with pools and selectors. The
// line is the same for the same failures in any order, and bounded in length. A pool that several nodes see
// is counted once.
func Explain(reqs *Requests, failures iter.Seq2[string, *Failure]) string {
	return ""
}
