// Random resized crops of JPEGs, flipped or not: as fast as plain C and libjpeg-turbo go.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <jpeglib.h>

enum { BITS = 7, ONE = 1 << BITS };

// Where a pixel comes from along one side: between two pixels, so far from the first.
typedef struct {
  int first, second, weight;
} Tap;

static double uniform(uint64_t *state) {  // in [0, 1), by xorshift64*
  *state ^= *state >> 12;
  *state ^= *state << 25;
  *state ^= *state >> 27;
  return (double)(*state * 0x2545F4914F6CDD1DULL >> 11) / (1ULL << 53);
}

// Draws a crop of 8 to 100% of the area, 3:4 to 4:3, as TensorFlow does: the ratio, then
// a height of those that fit.
static void draw(int height, int width, uint64_t *state, int box[4]) {
  double ratio = 3.0 / 4 + (4.0 / 3 - 3.0 / 4) * uniform(state);
  double most = fmin(height, width / ratio);
  double least = fmin(sqrt(0.08 * height * width / ratio), most);
  double drawn = least + (most - least) * uniform(state);
  box[2] = (int)fmax(1, lround(drawn));
  box[3] = (int)fmax(1, lround(drawn * ratio));
  if (box[3] > width) box[3] = width;
  box[0] = (int)(uniform(state) * (height - box[2] + 1));
  box[1] = (int)(uniform(state) * (width - box[3] + 1));
}

// Bilinear, centres of pixels at halves.
static void make_taps(int from, int to, int flip, Tap *taps) {
  for (int i = 0; i < to; i++) {
    double at = (i + 0.5) * from / to - 0.5;
    int first = (int)floor(at);
    int weight = (int)lround((at - first) * ONE), second = first + 1;
    if (first < 0) first = 0;
    if (second > from - 1) second = from - 1;
    taps[flip ? to - 1 - i : i] = (Tap){first, second, weight};
  }
}

// Rows of `pixels` lie `stride` apart; `between` has room for one row.
static void resize(const uint8_t *restrict pixels, size_t stride, int columns,
                   const Tap *rows, int height, const Tap *taps, int width,
                   uint16_t *restrict between, uint8_t *restrict out) {
  for (int y = 0; y < height; y++) {
    const uint8_t *a = pixels + rows[y].first * stride;
    const uint8_t *b = pixels + rows[y].second * stride;
    uint16_t weight = (uint16_t)rows[y].weight;
    for (int i = 0; i < 3 * columns; i++)
      between[i] = (uint16_t)(a[i] * (ONE - weight) + b[i] * weight);
    for (int x = 0; x < width; x++, out += 3) {
      const uint16_t *p = between + 3 * taps[x].first;
      const uint16_t *q = between + 3 * taps[x].second;
      for (int c = 0; c < 3; c++)
        out[c] = (uint8_t)((p[c] * (ONE - taps[x].weight) + q[c] * taps[x].weight +
                            (1 << (2 * BITS - 1))) >> (2 * BITS));
    }
  }
}

// Writes `count` images of [height, width, 3] to `out`.
void crop_batch(const unsigned char **jpegs, const unsigned long *sizes, int count,
                int height, int width, uint64_t *state, uint8_t *out) {
  struct jpeg_decompress_struct decoder;
  struct jpeg_error_mgr errors;
  decoder.err = jpeg_std_error(&errors);  // ends the process
  jpeg_create_decompress(&decoder);
  Tap *rows = malloc(height * sizeof(Tap)), *taps = malloc(width * sizeof(Tap));
  uint8_t *pixels = NULL;
  uint16_t *between = NULL;
  for (int n = 0; n < count; n++) {
    jpeg_mem_src(&decoder, jpegs[n], sizes[n]);
    jpeg_read_header(&decoder, TRUE);
    int box[4];
    draw(decoder.image_height, decoder.image_width, state, box);
    decoder.out_color_space = JCS_RGB;
    decoder.dct_method = JDCT_IFAST;
    decoder.do_fancy_upsampling = FALSE;
    jpeg_start_decompress(&decoder);
    // It starts at the block to the left of the crop.
    JDIMENSION left = box[1], columns = box[3];
    jpeg_crop_scanline(&decoder, &left, &columns);
    size_t stride = 3 * (size_t)decoder.output_width;
    pixels = realloc(pixels, stride * box[2]);
    between = realloc(between, 3 * box[3] * sizeof(uint16_t));
    jpeg_skip_scanlines(&decoder, box[0]);
    for (int y = 0; y < box[2];) {
      JSAMPROW row = pixels + y * stride;
      y += jpeg_read_scanlines(&decoder, &row, 1);
    }
    jpeg_abort_decompress(&decoder);
    make_taps(box[2], height, 0, rows);
    make_taps(box[3], width, uniform(state) < 0.5, taps);
    resize(pixels + 3 * (box[1] - left), stride, box[3], rows, height, taps, width,
           between, out + (size_t)n * height * width * 3);
  }
  jpeg_destroy_decompress(&decoder);
  free(rows);
  free(taps);
  free(pixels);
  free(between);
}
