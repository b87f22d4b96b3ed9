package config

import (
	stdjson "encoding/json"
	"errors"
	"fmt"

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
		return "", Settings{}, fmt.Errorf("not a JSON object: %w", err)
	}
	if err := json.UnmarshalCaseSensitivePreserveInts(raw, &head); err != nil {
		return "", Settings{}, fmt.Errorf("no apiVersion and kind: %w", err)
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
	if err := errors.Join(append([]error{err}, strict...)...); err != nil {
		return "", Settings{}, fmt.Errorf("%s: %w", head.Kind, err)
	}
	settings, err := config.settings()
	if err != nil {
		return "", Settings{}, fmt.Errorf("%s: %w", head.Kind, err)
	}
	return head.Kind, settings, nil
}
