package allocator

import "context"

// Attempt is one attempt to schedule a pod, with the time that it has. What its time does not suffice for on one node it
// is not spent on again on nodes that are alike. It must be comparable, and safe for concurrent use.
type Attempt interface {
	// Begin is called once for each search that does not end at once. It returns when that has to end, in a unit of its own.
	Begin() (end int64)
	// End is called when such a search has ended.
	End()
	// IsOver tells whether that moment has come.
	IsOver(end int64) bool
	// Evaluate is called around each evaluation of CEL expressions whose results are not kept from before. It returns a context that ends
	// when there is no time left for that, and what is to be called after it.
	Evaluate(ctx context.Context) (context.Context, context.CancelFunc)
}

// isOver tells whether the time for this node is over, and notes why.
func (s *search) isOver() bool {
	if s.in.ctx.Err() != nil {
		s.err = context.Cause(s.in.ctx)
		return true
	}
	if s.in.Attempt == nil {
		return false
	}
	if !s.begun {
		s.begun, s.end = true, s.in.Attempt.Begin()
	}
	if s.in.Attempt.IsOver(s.end) {
		s.err = context.DeadlineExceeded
	}
	return s.err != nil
}

// thorough searches with all shortcuts, after the attempts before got stuck. It begins with the claims: if one cannot be
// satisfied even when it is alone, there is no need to vary what comes before.
func (s *search) thorough() bool {
	s.stuck, s.limit = false, 0
	whole := s.order
	s.begin(whole)
	s.classify()
	var parts [][]int
	if len(s.reqs.claims) > 1 {
		for i := range s.reqs.claims {
			var part []int
			for _, r := range s.reqs.claims[i].requests {
				part = append(part, r.index)
			}
			parts = append(parts, part)
		}
	}
	for _, part := range parts {
		s.begin(part)
		if !s.decide(0) {
			if s.err == nil {
				s.begin(whole)
			}
			return false
		}
	}
	s.begin(whole)
	return s.request(0)
}

// shortAttempt is how many steps the short attempt may take: it mostly ends after few, and the preparation of the
// thorough one costs as much as some dozen.
const shortAttempt = 24

// preferSteps bounds the look for an answer in the order of a policy. Many looks end after fewer steps than shortPrefer,
// so that it does not pay to share what they find.
const preferSteps, shortPrefer = 512, 32

// prefer looks for the first answer in the order of the policy, after one was found in the order of FirstFit. If it
// finds none in so many steps that one stays: a policy never costs a pod its node. It returns false if more steps may
// change that.
func (s *search) prefer(steps int) (settled bool) {
	s.firstFit.set(&s.state)
	s.begin(s.order)
	s.classes, s.careful, s.stuck, s.limit = nil, true, false, s.steps+steps
	s.deviceOrder.rank()
	if s.request(0) {
		return true
	}
	settled = !s.stuck
	s.err, s.selectorError, s.stuck = nil, nil, false
	s.firstFit.restore(&s.state)
	return settled
}
