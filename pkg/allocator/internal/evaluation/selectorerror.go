// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package evaluation

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/inventory"
)

// SelectorError is a CEL selector, or the CEL expression of a derived attribute, that failed at run time on one device,
// or a required capacity that cannot be compared with the device's.
type SelectorError struct {
	// Namespace, Claim and Request name what asked.
	Namespace, Claim, Request string
	// Class is the DeviceClass if the selector is the class's; empty if it is the request's own.
	Class string
	// Attribute is the attribute that the expression derives; empty if it is a selector.
	Attribute resourceapi.FullyQualifiedName
	// Expression is the selector; empty if it is the required capacity.
	Expression string
	// Driver, Pool and Device name the device.
	Driver, Pool, Device string
	// Err is what CEL said.
	Err error
}

func (e *SelectorError) Error() string {
	explanation := e.Explanation()
	return explanation.String()
}

// Explanation is the error as a waiting pod is told.
func (e *SelectorError) Explanation() explain.SelectorError {
	return explain.SelectorError{
		Namespace: e.Namespace, Claim: e.Claim, Request: e.Request, DeviceClass: e.Class, Attribute: e.Attribute, Expression: e.Expression,
		Driver: e.Driver, Pool: e.Pool, Device: e.Device, Message: fmt.Sprint(e.Err),
	}
}

func (e *SelectorError) Unwrap() error { return e.Err }

// SelectorError says what failed on a device that the alternative cannot judge.
func (e *Evaluator) SelectorError(reqs *compiled.Requests, a *compiled.Alternative, p *inventory.NodePool, device int) *SelectorError {
	failed := newSelectorError(reqs, a, p, device)
	var ofClass bool
	e.evaluate(func(ctx context.Context) (interrupted error) {
		failed.Expression, ofClass, failed.Err, interrupted = a.Matcher.Error(ctx, p, device)
		return interrupted
	})
	if ofClass {
		failed.Class = a.Class.Object.Name
	}
	return failed
}

// DerivationError says that the constraint's attribute cannot be derived from a device.
func DerivationError(reqs *compiled.Requests, a *compiled.Alternative, c *compiled.Constraint, p *inventory.NodePool, device int,
	column *inventory.Column,
) *SelectorError {
	failed := newSelectorError(reqs, a, p, device)
	failed.Attribute, failed.Expression, failed.Err = c.Attribute, a.Derivation(c).Expression(), column.Err(device)
	return failed
}

func newSelectorError(reqs *compiled.Requests, a *compiled.Alternative, p *inventory.NodePool, device int) *SelectorError {
	object := reqs.Objects[a.Request.Claim]
	return &SelectorError{
		Namespace: object.Namespace, Claim: object.Name, Request: a.ResultName(),
		Driver: p.ID().Driver, Pool: p.ID().Pool, Device: p.Device(device).Name,
	}
}
