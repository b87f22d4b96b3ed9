// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	stdjson "encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"sigs.k8s.io/json"
)

// maxBytes is the API's limit for opaque parameters.
const maxBytes = 10 * 1024

// Decode reads opaque parameters, fills in defaults and validates them.
func Decode(raw []byte) (Kind, Settings, error) {
	if len(raw) > maxBytes {
		return "", Settings{}, fmt.Errorf("%d bytes: want at most %d", len(raw), maxBytes)
	}
	var head struct {
		APIVersion string `json:"apiVersion"`
		Kind       Kind   `json:"kind"`
	}
	var object map[string]stdjson.RawMessage
	if err := json.UnmarshalCaseSensitivePreserveInts(raw, &object); err != nil {
		var wrong *stdjson.UnmarshalTypeError
		if errors.As(err, &wrong) {
			return "", Settings{}, fmt.Errorf("not a JSON object: %s", short(raw))
		}
		return "", Settings{}, fmt.Errorf("not a JSON object: %w", err)
	}
	if err := json.UnmarshalCaseSensitivePreserveInts(raw, &head); err != nil {
		return "", Settings{}, inWords(raw, err)
	}
	if head.APIVersion != APIVersion {
		return "", Settings{}, fmt.Errorf("apiVersion: %q: want %s", head.APIVersion, APIVersion)
	}
	var config interface{ settings() (Settings, error) }
	switch head.Kind {
	case KindGPU:
		config = &gpuConfig{}
	case KindMIG:
		config = &migDeviceConfig{}
	case KindVFIO:
		config = &vfioDeviceConfig{}
	default:
		return "", Settings{}, unknown("kind", head.Kind, KindGPU, KindMIG, KindVFIO)
	}
	strict, err := json.UnmarshalStrict(raw, config)
	err = inWords(raw, err)
	if err := errors.Join(append([]error{err}, strict...)...); err != nil {
		return "", Settings{}, fmt.Errorf("%s: %w", head.Kind, err)
	}
	settings, err := config.settings()
	if err != nil {
		return "", Settings{}, fmt.Errorf("%s: %w", head.Kind, err)
	}
	return head.Kind, settings, nil
}

// inWords tells of a value of the wrong type as of other wrong values: the field as it is written, the value, and what
// is wanted. The decoder's words are Go's.
func inWords(raw []byte, err error) error {
	var wrong *stdjson.UnmarshalTypeError
	if !errors.As(err, &wrong) || wrong.Field == "" {
		return err
	}
	return fmt.Errorf("%s: %s: want %s", wrong.Field, short(valueAt(raw, wrong.Field)), wanted(wrong.Type))
}

func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int:
		return "a whole number"
	case reflect.String:
		return "a string"
	default:
		return "an object"
	}
}

// valueAt is the field's value as it is written; of fields in lists, which no kind has, nothing is known.
func valueAt(raw []byte, field string) []byte {
	for name := range strings.SplitSeq(field, ".") {
		var object map[string]stdjson.RawMessage
		if json.UnmarshalCaseSensitivePreserveInts(raw, &object) != nil {
			return nil
		}
		raw = object[name]
	}
	return raw
}

// short cuts values that are too long for a message.
func short(value []byte) string {
	const most = 64
	text := []rune(strings.TrimSpace(string(value)))
	if len(text) > most {
		return string(text[:most]) + "…"
	}
	return string(text)
}
