// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hostcheck

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Status of a prerequisite.
type Status string

// The statuses.
const (
	// OK: it is there, or will be made when it is needed.
	OK Status = "ok"
	// Note: there is something to know about it, and nothing to do.
	Note Status = "note"
	// Warning: claims are prepared, and something does not work, or is not safe.
	Warning Status = "warning"
	// Missing: claims cannot be prepared.
	Missing Status = "missing"
	// Unknown: it did not answer, or cannot be looked at from here.
	Unknown Status = "unknown"
)

// Finding is what is known of one prerequisite.
type Finding struct {
	// Check is the prerequisite's name in the table.
	Check  string `json:"check"`
	Status Status `json:"status"`
	// Message says what was found.
	Message string `json:"message"`
	// Do says what to do about it; empty if nothing is to be done.
	Do string `json:"do,omitempty"`
}

// deadline is how long one look may take.
const deadline = 5 * time.Second

// Checker looks at a node, each prerequisite by itself.
type Checker struct {
	host  Host
	table []Prerequisite
	// deadline is for one look.
	deadline time.Duration

	mu sync.Mutex
	// begun is when the look at a prerequisite began that has not ended, by name. No other one is begun meanwhile.
	begun map[string]time.Time
}

// New returns a checker of that host.
func New(host Host) *Checker {
	return &Checker{host: host, table: Table(), deadline: deadline, begun: map[string]time.Time{}}
}

// Run looks at all prerequisites that concern the host, at the same time, and returns what it found in the table's order. One that does not
// answer within 5 s, or before ctx ends, is Unknown.
func (c *Checker) Run(ctx context.Context) []Finding {
	table := slices.DeleteFunc(slices.Clone(c.table), func(p Prerequisite) bool { return p.driver && c.host.Simulated })
	findings := make([]Finding, len(table))
	ctx, cancel := context.WithTimeout(ctx, c.deadline)
	defer cancel()
	var group sync.WaitGroup
	for i, p := range table {
		group.Go(func() { findings[i] = c.one(ctx, p) })
	}
	group.Wait()
	return findings
}

func (c *Checker) one(ctx context.Context, p Prerequisite) Finding {
	if since, hangs := c.begin(p.Name); hangs {
		return p.silent(since)
	}
	began := time.Now()
	found := make(chan Finding, 1)
	go func() {
		defer c.end(p.Name)
		status, message := p.look(ctx, &c.host)
		f := Finding{Check: p.Name, Status: status, Message: message}
		if status != OK && status != Note {
			f.Do = p.Do
		}
		found <- f
	}()
	select {
	case f := <-found:
		return f
	case <-ctx.Done():
		return p.silent(began)
	}
}

func (c *Checker) begin(name string) (since time.Time, hangs bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	since, hangs = c.begun[name]
	if !hangs {
		c.begun[name] = time.Now()
	}
	return since, hangs
}

func (c *Checker) end(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.begun, name)
}

func (p *Prerequisite) silent(since time.Time) Finding {
	return Finding{
		Check: p.Name, Status: Unknown, Message: fmt.Sprintf("what it is read from has not answered since %s", since.UTC().Format(time.RFC3339)),
		Do: "Look whether a file system hangs (NFS, FUSE), a process is stuck in state D, or the container runtime does not answer. " + p.Do,
	}
}

// Worst is the worst status of the findings: Missing, Unknown, Warning or OK.
func Worst(findings []Finding) Status {
	for _, status := range []Status{Missing, Unknown, Warning} {
		if slices.ContainsFunc(findings, func(f Finding) bool { return f.Status == status }) {
			return status
		}
	}
	return OK
}
