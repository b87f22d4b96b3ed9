package allocator

import (
	"slices"
	"sync"
)

// answers are what searches for one pod found on nodes that look alike to it (look.go): one searches, the others have the
// same answer. That is for searches that take long; what is found at once is found at once on each node.
type answers struct {
	mu    sync.Mutex
	known map[fingerprint]*sharedAnswer
}

// maxAnswers bounds the memory for one pod. Nodes beyond are searched each for itself.
const maxAnswers = 4096

// sharedAnswer is what a search found, once settled is closed.
type sharedAnswer struct {
	settled chan struct{}
	// private answers are true for one node only: they name a device, or were not found for a reason of their own.
	private bool
	fits    bool
	chosen  []int // by request, if it fits
	// err is why the search ended early; true only for the attempt whose time was over.
	err error

	// attempt is the one that searches.
	attempt Attempt
}

// take returns the answer for nodes with this look, nil if there is no room for it, and whether the caller has to find and
// settle it.
func (t *answers) take(print fingerprint, attempt Attempt) (a *sharedAnswer, mine bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if a := t.known[print]; a != nil {
		return a, false
	}
	if len(t.known) >= maxAnswers {
		return nil, false
	}
	if t.known == nil {
		t.known = make(map[fingerprint]*sharedAnswer)
	}
	a = &sharedAnswer{settled: make(chan struct{}), private: true, attempt: attempt}
	t.known[print] = a
	return a, true
}

// finishOnce finishes the search, unless that was done for a node that looks like this one: then it takes over what was found
// there. While another one of the same attempt is at it, it waits. Who judges the node beside that attempt may have less time.
func (s *search) finishOnce(found, known bool) bool {
	print := s.look.fingerprint()
	if s.err != nil {
		return false // what was seen of the node is not all
	}
	a, mine := s.reqs.answers.take(print, s.in.Attempt)
	switch {
	case a == nil:
		return s.finish(found, known)
	case mine:
		defer close(a.settled)
		found = s.finish(found, known)
		a.set(s, found)
		return found
	}
	if !a.await(s) || !a.isFor(s) {
		return s.finish(found, known)
	}
	s.err = a.err
	if a.fits {
		s.chosen = append(s.chosen[:0], a.chosen...)
	}
	return a.fits
}

// await returns true when the answer is settled, and false if the search cannot wait for that.
func (a *sharedAnswer) await(s *search) bool {
	if a.attempt == s.in.Attempt {
		select {
		case <-a.settled:
		case <-s.in.ctx.Done():
		}
	}
	select {
	case <-a.settled:
		return s.in.ctx.Err() == nil
	default:
		return false
	}
}

// set notes what the search found.
func (a *sharedAnswer) set(s *search, found bool) {
	if s.selectorError != nil || (s.err != nil && (s.in.Attempt == nil || s.in.ctx.Err() != nil)) {
		return // private
	}
	a.private, a.fits, a.chosen, a.err = false, found, slices.Clone(s.chosen), s.err
}

// isFor tells whether the answer is true for the node of the search, too.
func (a *sharedAnswer) isFor(s *search) bool {
	return !a.private && (a.err == nil || a.attempt == s.in.Attempt)
}
