// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"fmt"
	"net/http"
	"sync"
)

// places bound the requests at once, of a user and of all.
type places struct {
	each, all int

	mu    sync.Mutex
	taken map[string]int
	sum   int
}

// take takes a place, which is to be given back, or tells why there is none.
func (p *places) take(user string) *refusal {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken[user] >= p.each {
		return &refusal{http.StatusTooManyRequests, fmt.Sprintf("you have %d of these open, which is the most for a user: close some", p.each)}
	}
	if p.sum >= p.all {
		return &refusal{http.StatusServiceUnavailable, fmt.Sprintf("all %d places are taken: try again", p.all)}
	}
	if p.taken == nil {
		p.taken = map[string]int{}
	}
	p.taken[user]++
	p.sum++
	return nil
}

func (p *places) leave(user string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken[user]--; p.taken[user] == 0 {
		delete(p.taken, user)
	}
	p.sum--
}
