// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"path"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	"stowage.dev/stowage/pkg/agent/prepare"
)

// drainTimeout is how long an agent that is asked to stop goes on for the calls that are under way. A roll-back that has begun
// comes to its end, and so does the agent in the 30 s that its pod has.
const drainTimeout = prepare.DefaultUndoTimeout + time.Second

// answerTime is how long the answer of a call may need to get to the kubelet: the server that has to send it is stopped at once.
const answerTime = 200 * time.Millisecond

// calls are the kubelet's calls to prepare and unprepare claims that are under way.
type calls struct {
	mu sync.Mutex
	n  int
	// last is when the last call ended, zero if there was none. none is closed when no call is under way any more; nil if none is.
	last time.Time
	none chan struct{}
}

// intercept counts calls from their very beginning: before a claim is prepared, it is read from the API server.
func (c *calls) intercept(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	operation := operationOf(info.FullMethod)
	if operation == "" {
		return handler(ctx, request)
	}
	c.begin()
	callsInFlight.WithLabelValues(operation).Inc()
	defer func() {
		callsInFlight.WithLabelValues(operation).Dec()
		c.end()
	}()
	return handler(ctx, request)
}

// operationOf names the call as the other metrics do, in any version of the DRA plugin API; empty for one of another API.
func operationOf(method string) string {
	service, call := path.Split(method)
	switch {
	case !strings.HasSuffix(service, ".DRAPlugin/"):
		return ""
	case call == "NodePrepareResources":
		return "prepare"
	case call == "NodeUnprepareResources":
		return "unprepare"
	}
	return ""
}

func (c *calls) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == 0 {
		c.none = make(chan struct{})
	}
	c.n++
}

func (c *calls) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = time.Now()
	if c.n--; c.n == 0 {
		close(c.none)
		c.none = nil
	}
}

// drain returns when no call has been under way for answerTime, or when ctx ends.
func (c *calls) drain(ctx context.Context) {
	for {
		c.mu.Lock()
		none, answered := c.none, c.last.Add(answerTime)
		c.mu.Unlock()
		var quiet <-chan time.Time
		if none == nil {
			rest := time.Until(answered)
			if rest <= 0 {
				return
			}
			quiet = time.After(rest)
		}
		select {
		case <-none:
		case <-quiet:
		case <-ctx.Done():
			return
		}
	}
}
