// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

// Keep is how long an answer counts while the kubelet gives no newer one. An update of the kubelet is over by then.
const Keep = 5 * time.Minute

// errNoPods is why an answer does not count.
var errNoPods = errors.New("the kubelet says that the node has no pods, as it does after a start until it has heard from the API server")

// Cache keeps what the kubelet has said last. Its methods may be called at the same time.
type Cache struct {
	list  func(context.Context) ([]Pod, error)
	clock clock.PassiveClock

	mu   sync.Mutex
	pods []Pod
	at   time.Time // when these were asked for; zero if there are none
}

// NewCache keeps the answers of list.
func NewCache(list func(context.Context) ([]Pod, error), clock clock.PassiveClock) *Cache {
	return &Cache{list: list, clock: clock}
}

// Pods asks the kubelet, and returns what it has said last, with the age of that; no pods if that is older than Keep. The error says
// why it is not new. An answer without any pod does not replace one with pods before that is older than Keep.
func (c *Cache) Pods(ctx context.Context) (pods []Pod, age time.Duration, err error) {
	asked := c.clock.Now()
	pods, err = c.list(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	age = c.clock.Since(c.at)
	if err == nil && len(pods) == 0 && len(c.pods) > 0 && age <= Keep {
		err = errNoPods
	}
	if err == nil && !asked.Before(c.at) {
		c.pods, c.at = pods, asked
	}
	switch age = c.clock.Since(c.at); {
	case c.at.IsZero():
		return nil, 0, err
	case age > Keep:
		c.pods = nil
		return nil, age, err
	}
	return c.pods, age, err
}
