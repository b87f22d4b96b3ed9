// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compiled

import "fmt"

// ClaimError says what is wrong with a claim, or with a class that it names, independent of any node: no
// node can be chosen until somebody changes the object.
type ClaimError struct {
	// Namespace and Claim name the claim.
	Namespace, Claim string
	// Subject is what the request stands for, where no user has written the claim. It is told instead of claim, request and field.
	Subject string
	// Request is the request, or "request/subrequest"; empty when the problem is the claim's as a whole.
	Request string
	// Class is the DeviceClass that the problem is about; empty when it is the claim's own.
	Class string
	// Field is the path of the offending field below the claim's (or class's) spec, such as
	// "devices.requests[0].exactly.selectors[1].cel.expression".
	Field string
	// Reason says what is wrong with the field's value.
	Reason string
	// Err is the underlying error, if there is one.
	Err error
}

func (e *ClaimError) Error() string {
	msg := fmt.Sprintf("claim %s/%s", e.Namespace, e.Claim)
	if e.Request != "" {
		msg += fmt.Sprintf(", request %q", e.Request)
	}
	if e.Subject != "" {
		msg = e.Subject
	}
	if e.Class != "" {
		msg += fmt.Sprintf(", device class %q", e.Class)
	}
	if e.Field != "" && (e.Subject == "" || e.Class != "") {
		msg += ", " + e.Field
	}
	msg += ": " + e.Reason
	if e.Err != nil {
		msg += ": " + e.Err.Error()
	}
	return msg
}

func (e *ClaimError) Unwrap() error { return e.Err }
