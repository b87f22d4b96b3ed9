// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package stepaside

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"stowage.dev/stowage/pkg/agent/durable"
)

// ErrStillOpen means that an agent of the node still has the driver open. The request stands.
var ErrStillOpen = errors.New("the agent still has the driver open")

// ErrStillReleased means that no agent of the node has opened the driver again.
var ErrStillReleased = errors.New("no agent has opened the driver again")

// Ask asks all agents of the node, of which Dir is in the state folder, for the driver, and waits until none has it open:
// that is proved by the lock that each has for as long as it does. what says what for. The error wraps ErrStillOpen if ctx
// ends before.
func Ask(ctx context.Context, dir, what string) error {
	data, err := json.Marshal(request{For: what, Since: time.Now()})
	if err != nil {
		return err
	}
	if err := change(dir, func() error { return durable.WriteFile(durable.OS{}, requestPath(dir), append(data, '\n'), 0o600) }); err != nil {
		return fmt.Errorf("write the request: %w", err)
	}
	for _, lock := range []string{openLock, passingLock} {
		var unlock func()
		if unlock, err = durable.Lock(ctx, filepath.Join(dir, lock)); err != nil {
			break
		}
		unlock()
	}
	if err == nil || ctx.Err() == nil {
		return err
	}
	waits, readErr := durable.OS{}.ReadFile(waitsPath(dir))
	if readErr != nil {
		return fmt.Errorf("%w, or closes it just now; the condition GPUsReady of the Node says more", ErrStillOpen)
	}
	return fmt.Errorf("%w, for %s", ErrStillOpen, waits)
}

// End takes the command's request back, and waits until an agent has the driver open again. The error wraps
// ErrStillReleased if others ask for it, or if ctx ends before.
func End(ctx context.Context, dir string) error {
	if err := change(dir, func() error { return durable.Remove(durable.OS{}, requestPath(dir)) }); err != nil {
		return fmt.Errorf("remove the request: %w", err)
	}
	for {
		if requests := noted(dir); len(requests) > 0 {
			return fmt.Errorf("%w: %s", ErrStillReleased, strings.Join(requests, "; "))
		}
		passes, err := isHeld(ctx, dir, passingLock)
		open := false
		if err == nil && !passes {
			open, err = isHeld(ctx, dir, openLock)
		}
		if open || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; the condition GPUsReady of the Node says why", ErrStillReleased)
		case <-time.After(lookInterval):
		}
	}
}

// isHeld tells whether an agent has the lock, as far as that is known when ctx ends: then it says no.
func isHeld(ctx context.Context, dir, lock string) (bool, error) {
	soon, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	unlock, err := durable.Lock(soon, filepath.Join(dir, lock))
	switch {
	case err == nil:
		unlock()
		return false, nil
	case soon.Err() != nil:
		return ctx.Err() == nil, nil
	}
	return false, err
}
